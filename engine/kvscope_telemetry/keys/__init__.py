"""Who may connect: key files, the list of those let in, and what a client remembers. Knows no sockets."""
