"""Builds frames from the state of an engine: kvscope's own, a simulated one, or another engine that kvscope
observes.
"""
