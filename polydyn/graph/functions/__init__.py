"""Operators defined by other operators (``polydyn/graph/bodies.py``). A body follows ONNX's specification."""
