"""Segmentation networks, one architecture a file."""
