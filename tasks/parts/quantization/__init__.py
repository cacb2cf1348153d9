"""From a float graph to INT8: ranges, Q/DQ pairs, and what they cost in accuracy."""
