"""Cached prefixes as a tree, built from each block's parent hash. Knows hashes; no Qt, no sockets."""
