"""Dialogs of a window: attaching to an engine, and help."""
