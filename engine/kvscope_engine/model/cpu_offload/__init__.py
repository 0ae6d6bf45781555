"""Weights of a GPU's model that stay in host memory: which, how they get through the load, how they are streamed."""
