"""Roofline: each step's work compared with the device's limits."""
