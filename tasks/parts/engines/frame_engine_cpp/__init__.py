"""The C++ program of a bundle: its source, and what writes it."""
