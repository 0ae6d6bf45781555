"""Speculative decoding: guesses tokens, which the model then checks several at a time."""
