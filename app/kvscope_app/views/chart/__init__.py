"""Curves over time: numpy preparation, axes, one panel with its values, and the choice of the time shown."""
