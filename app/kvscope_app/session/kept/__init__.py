"""What is kept of a session: its ring, recordings, bookmarks and texts."""
