"""Architectures of networks, and how one is kept in a file."""
