"""Sparse decode attention: chooses the blocks that a layer reads, and counts the blocks that it skips."""
