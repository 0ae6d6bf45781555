"""Splits a batch of decodes into parts, one for each program of a launch."""
