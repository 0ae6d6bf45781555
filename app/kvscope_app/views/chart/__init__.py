"""Curves over time: preparation in numpy, axes, panels with current values, and the choice of the time range."""
