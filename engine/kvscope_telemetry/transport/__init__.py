"""All code that uses ZeroMQ: the two sockets of an engine and of a client, their endpoints and locks."""
