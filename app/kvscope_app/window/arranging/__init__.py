"""Layouts of a window: kept under names, and what was changed in one taken back."""
