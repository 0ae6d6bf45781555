"""Tile sizes found by measurement: a table for each measured GPU, and functions to look them up."""
