"""Operations on the logits of a step, before a token is drawn."""
