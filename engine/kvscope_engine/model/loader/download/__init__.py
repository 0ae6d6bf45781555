"""Resolves model names to local files, downloading them if necessary."""
