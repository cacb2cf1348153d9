"""The data set on disk, and metrics of predictions on it."""
