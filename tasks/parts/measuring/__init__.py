"""What is measured of an engine: how accurate it is, how fast, and how certain that is."""
