"""Models of one operator or a short idiom, timed beside ONNX Runtime (``python -m benchmarks.single``)."""
