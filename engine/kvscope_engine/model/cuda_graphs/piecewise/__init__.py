"""CUDA graphs of steps that mix prefills and decodes: all but attention and the head, piece by piece."""
