"""ONNX graphs: exported from a network, read from a file, measured and rewritten."""
