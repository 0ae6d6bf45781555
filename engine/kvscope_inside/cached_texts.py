"""Tokens of cached blocks of any tier, by ledger row: what the blocks hold once the request that wrote them is gone.

Also finds blocks by the tokens that a text begins with, which tells a prompt that is cached under another adapter or
cache salt from one that is not cached.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

BlockNotes = tuple[tuple[str, str], ...]
"""Names and values that describe a block beside its tokens, such as its adapter."""


@dataclass(frozen=True, slots=True)
class CachedText:
    """The text of one cached block."""

    number: int
    """The request that the block was written for; 0: unknown."""
    start: int
    """Position in that request's text at which the block begins, in tokens."""
    token_ids: array[int]
    key: tuple[str, str] = ("", "")
    """The adapter and the cache salt that the block's hash depends on beside its tokens."""
    notes: BlockNotes = ()


class CachedTexts:
    """Texts of cached blocks by row. Belongs to the thread that publishes."""

    def __init__(self) -> None:
        self._by_row: dict[int, CachedText] = {}
        self._first_rows: dict[bytes, int] = {}
        """The first cached block that holds the tokens of a text's first block, by those tokens."""

    def __len__(self) -> int:
        return len(self._by_row)

    def __contains__(self, row: int) -> bool:
        return row in self._by_row

    def get(self, row: int) -> CachedText | None:
        """The text of the block in this row; None where it is unknown."""
        return self._by_row.get(row)

    def set(self, row: int, text: CachedText, *, is_first: bool = False) -> None:
        """Remember the text of a block. With `is_first` it is found by its tokens, too."""
        self._by_row[row] = text
        if is_first:
            self._first_rows.setdefault(text.token_ids.tobytes(), row)

    def discard(self, row: int) -> None:
        """Forget the text of a block, if it is known."""
        text = self._by_row.pop(row, None)
        if text is not None and not text.start and self._first_rows.get(tokens := text.token_ids.tobytes()) == row:
            del self._first_rows[tokens]

    def beginning_with(self, token_ids: array[int]) -> CachedText | None:
        """The text whose first block holds exactly these tokens; None where no cached one does."""
        return self._by_row.get(self._first_rows.get(token_ids.tobytes(), -1))

    def clear(self, num_rows: int) -> None:
        """Forget the texts of the first `num_rows` rows (the pool's): its prefix cache was emptied."""
        for row in [row for row in self._by_row if row < num_rows]:
            del self._by_row[row]
        self._first_rows.clear()
