"""Texts of blocks in recordings: which are asked for, how they are written and found again. Knows no file."""
