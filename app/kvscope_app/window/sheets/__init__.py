"""Sheets and dialogs over a window: they ask or explain something."""
