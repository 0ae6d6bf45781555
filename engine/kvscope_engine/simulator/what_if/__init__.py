"""Compares the memory that a running engine's requests would take under other allocation policies."""
