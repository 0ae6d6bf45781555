"""Tensor parallelism inside a process: the rank, its share of the model, and sums over all ranks."""
