"""Roofline model: the minimum memory traffic and FLOPs of a step, and the device's measured limits."""
