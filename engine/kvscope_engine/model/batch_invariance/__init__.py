"""Deterministic mode: steps computed in tiles of a fixed size, and the proof that a row's place does not matter."""
