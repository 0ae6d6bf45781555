"""Stores the tokens of cached blocks of all tiers by ledger row, even after the request that wrote them has ended.

Also finds a block by the first tokens of a text, which distinguishes a prompt that is cached under another adapter or
cache salt from one that is not cached.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

BlockNotes = tuple[tuple[str, str], ...]
"""Pairs of name and value that describe a block in addition to its tokens, such as its adapter."""


@dataclass(frozen=True, slots=True)
class CachedText:
    number: int
    """Number of the request for which the block was written; 0 if unknown."""
    start: int
    """Position of the block's first token in the text of request `number`."""
    token_ids: array[int]
    key: tuple[str, str] = ("", "")
    """Adapter and cache salt, which are part of the block's hash."""
    notes: BlockNotes = ()


class CachedTexts:
    def __init__(self) -> None:
        self._by_row: dict[int, CachedText] = {}
        self._first_rows: dict[bytes, int] = {}
        """Map from the tokens at the beginning of a text (one block, as bytes) to the ledger row of the cached
        block that was stored first with these tokens.
        """

    def __len__(self) -> int:
        return len(self._by_row)

    def __contains__(self, row: int) -> bool:
        return row in self._by_row

    def get(self, row: int) -> CachedText | None:
        return self._by_row.get(row)

    def set(self, row: int, text: CachedText, *, is_first: bool = False) -> None:
        """Store the tokens of the block in `row`. With `is_first`, `beginning_with` can find the block."""
        self._by_row[row] = text
        if is_first:
            self._first_rows.setdefault(text.token_ids.tobytes(), row)

    def discard(self, row: int) -> None:
        text = self._by_row.pop(row, None)
        if text is not None and not text.start and self._first_rows.get(tokens := text.token_ids.tobytes()) == row:
            del self._first_rows[tokens]

    def beginning_with(self, token_ids: array[int]) -> CachedText | None:
        """Return the text whose first block holds exactly these tokens; None if no such block is cached."""
        return self._by_row.get(self._first_rows.get(token_ids.tobytes(), -1))

    def clear(self, num_rows: int) -> None:
        """Remove the texts of ledger rows 0 to `num_rows` - 1. Called when the prefix cache of the pool was emptied."""
        for row in [row for row in self._by_row if row < num_rows]:
            del self._by_row[row]
        self._first_rows.clear()
