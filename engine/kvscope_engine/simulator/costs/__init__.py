"""Estimates how long a step takes on a device: the cost model, its fit to measurements, and its file format."""
