"""Layouts of a window: named layouts, and undo of layout changes."""
