"""The data set on disk, and how right a prediction of it is."""
