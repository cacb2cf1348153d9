"""PyTorch, eager."""
