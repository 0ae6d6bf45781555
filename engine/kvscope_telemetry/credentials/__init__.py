"""Authentication: key files, the allow-list, and saved API keys. Must not depend on sockets."""
