"""Use of the device's memory, and of the KV pool's blocks."""
