"""Weights of a GPU's model that stay in host memory: which layers are chosen, how they are loaded, and how they are
streamed to the GPU.
"""
