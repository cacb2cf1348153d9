"""Run an engine on frames, away from the repository: a bundle holds a copy of this package."""
