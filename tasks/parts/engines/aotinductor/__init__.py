"""PyTorch, compiled ahead of time."""
