"""The engine that the desktop starts itself: its process, its options, its end."""
