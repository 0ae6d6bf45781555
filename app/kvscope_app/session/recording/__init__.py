"""Stored data of a session: its ring, recordings, bookmarks and texts."""
