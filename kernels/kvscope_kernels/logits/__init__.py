"""Operations on the logits of a step, up to and including sampling."""
