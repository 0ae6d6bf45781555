"""Prefix tree of cached blocks, built from each block's parent hash. Must not depend on Qt or sockets."""
