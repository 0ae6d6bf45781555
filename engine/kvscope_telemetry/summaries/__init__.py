"""Summaries: one-second aggregates of a session, and the overview of all its seconds. Must not depend on files."""
