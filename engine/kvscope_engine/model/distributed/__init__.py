"""Tensor parallelism within a process: its rank, its shard of the model, and sums over all ranks."""
