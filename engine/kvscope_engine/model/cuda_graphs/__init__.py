"""CUDA graphs of decode steps and of the pieces of steps with prefills: capture, replay, and handling of failed
captures.
"""
