"""Piecewise CUDA graphs of steps that mix prefills and decodes: everything but attention and the head."""
