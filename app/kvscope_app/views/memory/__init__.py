"""Memory view: use of the device's memory, and of the KV pool's blocks."""
