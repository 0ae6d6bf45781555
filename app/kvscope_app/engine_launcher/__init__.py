"""The engine process that the desktop starts itself: its options, its lifetime, and its files."""
