"""The roofline: each step's work against the device's limits."""
