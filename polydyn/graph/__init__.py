"""The graph: import from ONNX, operators, symbolic shape propagation, primitives, passes."""
