"""Two timelines side by side: one cursor for both, their curves, and the table of their key figures."""
