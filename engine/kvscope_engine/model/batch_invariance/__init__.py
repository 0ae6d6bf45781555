"""Deterministic mode: runs steps in tiles of a fixed number of tokens, and proves that a token's position in a tile
does not affect its result.
"""
