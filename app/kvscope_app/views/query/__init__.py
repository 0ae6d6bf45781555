"""SQL queries over the session's requests, steps, seconds and events."""
