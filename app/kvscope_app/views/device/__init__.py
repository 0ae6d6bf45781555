"""Devices: memory by process, utilization, temperature and throttling of every GPU and of the host, with their
history."""
