"""TensorRT. Not run on real hardware."""
