"""The two socket pairs of engine and client, their endpoints and locks: all code that uses ZeroMQ."""
