"""Speculative decoding: guesses tokens, which the model then verifies several at a time."""
