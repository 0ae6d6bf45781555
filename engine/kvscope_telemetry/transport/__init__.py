"""All code that uses ZeroMQ: the two socket pairs between engine and client, their endpoints and locks."""
