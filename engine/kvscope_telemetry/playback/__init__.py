"""A recording, or a ring, played as a source: its clock, its thread, and what becomes of each message."""
