"""Appearance: theme, stylesheet, icons, fonts, small widgets and number formatting."""
