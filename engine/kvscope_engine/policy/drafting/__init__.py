"""Tokens guessed ahead of the model, to be checked by it several at a time."""
