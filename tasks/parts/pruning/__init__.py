"""Removing parts of a network, and recovering its accuracy."""
