"""Sparse decode attention: choice of the blocks that a layer reads, and statistics of the blocks that it skips."""
