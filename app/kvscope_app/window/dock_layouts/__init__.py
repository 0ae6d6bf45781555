"""Layouts of a window's docks: named layouts, files, undo, and dock sizes."""
