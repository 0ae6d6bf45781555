"""Comparison of attention methods for long contexts on the keys and values of a real model. Not used by the server."""
