"""Watches transformers' continuous batching in the process that runs it: call `watch` with a
`ContinuousBatchingManager`.
"""
