"""Weights of a GPU's model that stay in host memory: their choice, their handling during load, and their streaming."""
