"""Authentication: key files, the allow-list, and remembered API keys. Must not depend on sockets."""
