"""Speculative decoding: drafts tokens, several of which the model then verifies in one pass."""
