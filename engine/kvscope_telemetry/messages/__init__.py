"""The wire protocol: messages, commands, their encoding and their validation. Must not depend on sockets."""
