"""Tensor parallelism across processes: rank 0 starts the other ranks, sends them each step and monitors them."""
