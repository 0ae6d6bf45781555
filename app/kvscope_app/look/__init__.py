"""How things look: theme, stylesheet, icons, fonts, small widgets, numbers as text."""
