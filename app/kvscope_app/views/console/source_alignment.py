"""Relates the characters of shown text to those of its Markdown source. Imports no Qt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from typing import Final

_WORD: Final = re.compile(r"\w+|\W")
MAX_ALIGNED_CHARACTERS: Final = 20_000


@lru_cache(maxsize=8)
def _matches(source: str, shown: str) -> tuple[tuple[int, int, int], ...]:
    """Return (offset in `shown`, offset in `source`, length) of equal parts, in order."""
    source_words, shown_words = _WORD.findall(source), _WORD.findall(shown)
    source_offsets, shown_offsets = _offsets(source_words), _offsets(shown_words)
    blocks = SequenceMatcher(None, source_words, shown_words).get_matching_blocks()
    return tuple(
        (shown_offsets[block.b], source_offsets[block.a], shown_offsets[block.b + block.size] - shown_offsets[block.b])
        for block in blocks
        if block.size
    )


def source_offset(source: str, shown: str, offset: int) -> int | None:
    """Return the offset in `source` of the character at `offset` in `shown`, which is `source` without its markup.

    None if the character is not in the source, such as a bullet, or if the source is too long to be compared.
    """
    if len(source) > MAX_ALIGNED_CHARACTERS:
        return None
    for start, source_start, length in _matches(source, shown):
        if start <= offset < start + length:
            return source_start + offset - start
    return None


def shown_ranges(source: str, shown: str, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of `shown` that come from `ranges` of `source`, given as (start, end). All are in order."""
    if len(source) > MAX_ALIGNED_CHARACTERS or not ranges:
        return []
    found = []
    matches = _matches(source, shown)
    first = 0
    for start, end in ranges:
        while first < len(matches) and matches[first][1] + matches[first][2] <= start:
            first += 1
        for shown_start, source_start, length in islice(matches, first, None):
            if source_start >= end:
                break
            low, high = max(start, source_start), min(end, source_start + length)
            found.append((shown_start + low - source_start, shown_start + high - source_start))
    return found


def _offsets(words: list[str]) -> list[int]:
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return offsets
