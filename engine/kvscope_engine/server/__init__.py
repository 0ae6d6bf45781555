"""The engine as a process: sockets, commands, token streams."""
