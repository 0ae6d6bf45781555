"""Summaries: what a glance at a second of a session needs, and the course of all of them. Knows no files."""
