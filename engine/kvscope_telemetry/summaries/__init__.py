"""Summaries: what a glance at a second of a session needs, and the overview of all of them. Knows no files."""
