"""Device memory and pinned host memory: sizes, plans, the processes that hold memory, and buffers for copies."""
