"""Tensor parallelism: one model on several ranks (processes, each with a device); each rank has its heads of every
block.
"""
