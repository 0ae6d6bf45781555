"""Texts of a simulated engine: each token stands for one of a dozen words."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

WORDS = ("the", "cache", "keeps", "what", "was", "read", "so", "each", "new", "word", "costs", "little")


def text_of(token_ids: Sequence[int]) -> str:
    """Return the words of tokens."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)


def tokens_of(text: str) -> list[int]:
    """Return a token for every four characters of a text, at least one. They follow from what comes before them."""
    ends = range(4, max(len(text), 4) + 1, 4)
    return [-1 - (crc32(text[:end].encode()) & 0x3FFF_FFFF) for end in ends]


class Words:
    """Makes a completion's text of its tokens, as a detokenizer does."""

    stopped = False

    def add_token(self, token_id: int, *, may_stop: bool) -> str:
        """Return the word of a token, with a space behind it."""
        return text_of([token_id]) + " "

    def flush(self) -> str:
        """Nothing is held back."""
        return ""
