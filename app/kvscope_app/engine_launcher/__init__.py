"""The engine process that the desktop starts: its options, its lifetime, and its files."""
