"""Build an engine from a graph or checkpoint; one module per runtime."""
