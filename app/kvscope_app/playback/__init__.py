"""Playing a recording: its clock, its bar, its actions."""
