"""The wire protocol: messages, commands, and their encoding and validation. Must not depend on sockets."""
