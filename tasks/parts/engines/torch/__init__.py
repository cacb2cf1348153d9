"""PyTorch, eager or compiled ahead of time."""
