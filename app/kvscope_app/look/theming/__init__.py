"""Applies themes to the application: the stylesheet, the color-blind palette, and the user's choice."""
