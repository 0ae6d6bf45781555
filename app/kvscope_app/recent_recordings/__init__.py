"""Recordings that were opened or made last, and a window that lists the recordings of a folder."""
