"""One connection to an engine's HTTP server, and what is said where it fails. Knows nothing of what is asked."""
