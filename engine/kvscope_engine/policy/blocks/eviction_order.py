"""Which cached block is evicted next, and which are pinned: those stay until somebody lets them.

Owns the order and the pins. Knows ids alone: a pin holds whether its block is in use or cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain


class EvictionOrder:
    """Cached blocks, the one to be evicted first at the front; pinned ones stand aside."""

    __slots__ = ("_idle", "_kept", "pinned")

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        """Blocks that are not evicted, in use or cached."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: dict[int, None] = {}  # cached and pinned

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        """Whether a cached block can be evicted."""
        return block in self._idle

    @property
    def num_cached(self) -> int:
        """Cached blocks, those that are pinned too."""
        return len(self._idle) + len(self._kept)

    @property
    def cached(self) -> list[int]:
        """All of them."""
        return list(chain(self._idle, self._kept))

    def add(self, blocks: list[int]) -> None:
        """They are cached from now on, the first of them the first to be evicted."""
        if self.pinned:
            self._kept.update(dict.fromkeys(block for block in blocks if block in self.pinned))
            blocks = [block for block in blocks if block not in self.pinned]
        self._idle.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        """A cached block is in use again, or gone."""
        if block in self._idle:
            del self._idle[block]
        else:
            del self._kept[block]

    def pop(self, count: int) -> list[int]:
        """Take out the next to be evicted, at most `len(self)`."""
        return [self._idle.popitem(last=False)[0] for _ in range(count)]

    def pin(self, blocks: Iterable[int]) -> None:
        """None of these is evicted any more."""
        for block in blocks:
            self.pinned.add(block)
            if block in self._idle:
                del self._idle[block]
                self._kept[block] = None

    def unpin(self, blocks: Iterable[int]) -> None:
        """They may be evicted again: cached ones as if they were used just now."""
        for block in blocks:
            self.pinned.discard(block)
            if block in self._kept:
                del self._kept[block]
                self._idle[block] = None

    def clear(self) -> list[int]:
        """Nothing is cached or pinned any more; returns what was cached, the last to be evicted first."""
        blocks = self.cached[::-1]
        self._idle.clear()
        self._kept.clear()
        self.pinned.clear()
        return blocks

    def check(self) -> None:
        """Raise AssertionError where what is kept does not agree with itself."""
        assert self._kept.keys() <= self.pinned, "a block stands aside that is not pinned"
        assert not self._idle.keys() & self.pinned, "a pinned block is to be evicted"
