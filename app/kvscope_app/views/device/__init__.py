"""Devices: memory by process, utilization, temperature and throttling of GPUs and of the host, over time."""
