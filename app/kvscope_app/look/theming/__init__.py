"""Putting a theme onto the application: the stylesheet, the colour-blind palette, and which one was chosen."""
