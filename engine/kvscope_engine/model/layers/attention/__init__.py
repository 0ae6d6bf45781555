"""Paged attention as transformers calls it, and what it needs of positions, biases and measured scores."""
