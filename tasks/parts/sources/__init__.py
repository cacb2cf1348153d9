"""Sources of images and labels: the user's folders, or generated scenes."""
