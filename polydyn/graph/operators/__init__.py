"""ONNX operators: the shape rule and the expansion of each, next to each other."""
