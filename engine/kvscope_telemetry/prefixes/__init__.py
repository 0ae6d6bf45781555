"""Prefix tree of cached blocks, built from each block's parent hash. Knows hashes; uses no Qt and no sockets."""
