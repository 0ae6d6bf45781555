"""Tile sizes found by measurement: tables for measured GPUs, and access to them."""
