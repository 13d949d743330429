"""Operators written as other operators (``polydyn/graph/bodies.py``); a body says what ONNX's specification says."""
