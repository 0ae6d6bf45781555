"""Fused replacements for parts of a model: fused, packed and quantized linear layers, attention, MLP, experts and
decoder layers.
"""
