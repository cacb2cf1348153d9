"""What the runtime of a target reaches on a machine."""
