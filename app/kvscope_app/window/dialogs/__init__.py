"""Dialogs over a window that ask for or show something."""
