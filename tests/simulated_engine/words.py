"""Texts of a simulated engine: each token is one of a dozen words."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

WORDS = ("the", "cache", "keeps", "what", "was", "read", "so", "each", "new", "word", "costs", "little")


def text_of(token_ids: Sequence[int]) -> str:
    """Return the words of tokens."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)


def tokens_of(text: str) -> list[int]:
    """Return one token for every four characters of a text, at least one. Each depends on the text before it."""
    ends = range(4, max(len(text), 4) + 1, 4)
    return [-1 - (crc32(text[:end].encode()) & 0x3FFF_FFFF) for end in ends]


class WordDetokenizer:
    """Makes the text of a completion from its tokens, like a detokenizer."""

    stopped = False

    def add_token(self, token_id: int, *, may_stop: bool) -> str:
        """Return the word of a token, followed by a space."""
        return text_of([token_id]) + " "

    def flush(self) -> str:
        """Return an empty text: nothing is held back."""
        return ""
