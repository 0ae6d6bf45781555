"""Bookmarks, loops and alarms of a window: the user's actions on them, and how alarms are shown."""
