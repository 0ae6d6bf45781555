"""Speculative decoding: drafts several tokens, which the model then verifies in one pass."""
