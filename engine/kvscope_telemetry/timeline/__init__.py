"""The timeline of a live session: its last minutes on disk, written all the time and read as one recording."""
