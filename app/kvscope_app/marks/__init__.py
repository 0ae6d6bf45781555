"""Bookmarks, loops and alarms of a window: what a person does with them, and how alarms are told."""
