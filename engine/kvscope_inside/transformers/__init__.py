"""Watches transformers' continuous batching in its own process: call `watch` with a manager."""
