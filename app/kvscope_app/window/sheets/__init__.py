"""Sheets and dialogs over a window: what it asks, and what it explains."""
