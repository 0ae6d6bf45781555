"""Exports: a recording, or a range of it, for other tools and other people. Knows recordings, no Qt."""
