"""Proofs at load that our attention, and every replaced part of a model, gives what transformers gives."""
