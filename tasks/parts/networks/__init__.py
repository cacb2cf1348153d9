"""Network architectures, and the checkpoint file of a network."""
