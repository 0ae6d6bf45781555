"""Sampling: converts logits to tokens, for a whole batch at a time."""
