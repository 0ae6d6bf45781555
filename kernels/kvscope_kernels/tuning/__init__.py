"""Tile sizes found by measurement: tables for measured GPUs, and the search that creates them."""
