"""Tile sizes by measurement: the tables of GPUs that were measured, and the search that makes them."""
