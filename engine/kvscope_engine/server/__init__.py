"""Server process of the engine: sockets, commands and token streams."""
