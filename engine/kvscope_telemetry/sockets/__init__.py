"""The two socket pairs, their endpoints and their locks; all that touches ZeroMQ."""
