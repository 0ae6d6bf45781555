"""Deterministic mode: runs steps in tiles of a fixed size, and proves that a row's position in a tile does not
matter."""
