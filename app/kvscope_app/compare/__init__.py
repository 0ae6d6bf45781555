"""Side-by-side comparison of two timelines: a shared cursor, their curves, and a table of key figures."""
