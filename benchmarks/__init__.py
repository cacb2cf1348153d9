"""Scripts that measure what the documentation claims; each prints a table."""
