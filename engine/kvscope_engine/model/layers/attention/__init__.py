"""Paged attention with the interface of transformers, and its support for positions, biases and attention scores."""
