"""Quantization of a float graph to INT8: ranges, Q/DQ pairs, and their loss of accuracy."""
