"""Checks at load that our attention, and every replaced part of the model, gives what transformers gives."""
