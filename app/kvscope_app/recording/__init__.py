"""Keeping what a live session shows: recordings of it, and how much of its past there is. Windows ask for it here."""
