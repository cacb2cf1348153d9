"""Run an engine on frames: the code that benchmark and validate run, and that a bundle ships."""
