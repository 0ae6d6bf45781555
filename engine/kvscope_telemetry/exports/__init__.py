"""Exports of a recording, or of a range of it, for other tools and other people. Uses recordings, not Qt."""
