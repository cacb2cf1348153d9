"""Where the time of an engine goes, and why it is not faster."""
