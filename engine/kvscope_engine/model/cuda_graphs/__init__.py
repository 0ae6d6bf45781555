"""CUDA graphs of decode steps and of the pieces of steps with prefills: capture, replay, failed captures."""
