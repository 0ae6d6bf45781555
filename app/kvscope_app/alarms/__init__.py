"""Bookmarks, loops and alarms of a window: the user's actions on them, and the display of alarms."""
