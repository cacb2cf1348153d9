"""Scripts that measure what the README claims; each prints a table."""
