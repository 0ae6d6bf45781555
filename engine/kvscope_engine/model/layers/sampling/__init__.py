"""From logits to tokens, for a whole batch at once."""
