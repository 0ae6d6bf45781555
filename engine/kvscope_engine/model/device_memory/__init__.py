"""Memory of the device and pinned memory of the host: sizes, plans, holders, and buffers for copies."""
