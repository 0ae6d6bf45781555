"""Applies themes to the application: the stylesheet, the colour-blind palette, and the user's choice."""
