"""Paged attention with the interface of transformers, with support for positions, biases and measured
attention scores.
"""
