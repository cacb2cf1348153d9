"""How fast an engine is, and how certain that is."""
