"""Cached prefixes as a tree, made of what each block says of the one before it. Knows hashes; no Qt, no sockets."""
