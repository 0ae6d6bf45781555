"""Checks at load that our attention, and every replaced part of a model, gives the same results as transformers."""
