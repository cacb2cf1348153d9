"""Nouns that two or more stages share."""
