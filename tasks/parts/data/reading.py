"""How an image file becomes what a network reads, from prepare_data to whoever runs the engine."""

from tasks.parts.reading.rules import Reading, ResizeMode

__all__ = ["Reading", "ResizeMode"]
