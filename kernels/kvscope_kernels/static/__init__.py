"""What can be read off a compiled kernel without running it. Knows no GPU."""
