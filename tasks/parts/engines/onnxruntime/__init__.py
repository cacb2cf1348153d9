"""ONNX Runtime, on the CPU or an NVIDIA GPU."""
