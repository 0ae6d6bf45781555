"""Memory of the device and pinned memory of the host: sizes, plans, the processes that hold it, and buffers for
copies."""
