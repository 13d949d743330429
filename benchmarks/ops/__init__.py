"""Single operators as models: the drawn list of products, and the builders of one-operator ONNX files."""
