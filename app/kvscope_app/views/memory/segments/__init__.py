"""Torch's segments and blocks as a map, asked for on demand."""
