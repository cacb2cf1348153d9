"""From a graph or checkpoint to an engine; one module per runtime."""
