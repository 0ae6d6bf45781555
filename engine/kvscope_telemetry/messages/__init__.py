"""What goes over the wire: messages, commands, their encoding and what must hold in them. Knows no sockets."""
