"""TensorRT for RTX. Not run on real hardware."""
