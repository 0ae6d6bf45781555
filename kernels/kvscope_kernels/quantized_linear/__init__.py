"""Weights of 4 and 8 bits in groups, and products with them on a GPU; products on a CPU are in `cpu`."""
