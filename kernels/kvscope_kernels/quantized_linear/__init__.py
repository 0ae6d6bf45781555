"""Weights of 4 and 8 bits in groups: what they are, and the product with them on a GPU; on a CPU it is `cpu`'s."""
