"""The state rebuilt from frames: mirrors, and what keeps them in step. Knows no sockets."""
