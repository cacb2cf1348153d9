"""Where images and their labels come from: folders of the user, or drawn scenes."""
