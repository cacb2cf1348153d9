"""ONNX graphs: written from a network, read from a file, measured and rewritten."""
