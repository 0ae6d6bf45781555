"""The console: chat with the engine, several conversations at once, and the load beside it."""
