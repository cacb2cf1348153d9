"""Read an image as it was read for training: the code of prepare_data and of every bundle, on numpy alone."""
