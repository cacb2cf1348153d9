"""Code that two or more stages share."""
