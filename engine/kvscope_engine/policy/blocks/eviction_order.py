"""Which cached block is evicted next, and which are pinned: those stay until somebody lets them.

Owns the order and the pins. Knows ids alone: a pin holds whether its block is in use or cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain


class EvictionOrder:
    """Cached blocks, the one to be evicted first at the front; pinned ones stand aside."""

    __slots__ = ("_kept", "idle", "pinned")

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        """Blocks that are not evicted, in use or cached."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Those that can be evicted, for who looks for many; changed here alone."""
        self._kept: dict[int, None] = {}  # cached and pinned

    def __len__(self) -> int:
        return len(self.idle)

    def __contains__(self, block: int) -> bool:
        """Whether a cached block can be evicted."""
        return block in self.idle

    @property
    def num_cached(self) -> int:
        """Cached blocks, those that are pinned too."""
        return len(self.idle) + len(self._kept)

    @property
    def cached(self) -> list[int]:
        """All of them."""
        return list(chain(self.idle, self._kept))

    def add(self, blocks: list[int]) -> None:
        """They are cached from now on, the first of them the first to be evicted."""
        if self.pinned:
            self._kept.update(dict.fromkeys(block for block in blocks if block in self.pinned))
            blocks = [block for block in blocks if block not in self.pinned]
        self.idle.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        """A cached block is in use again, or gone."""
        if block in self.idle:
            del self.idle[block]
        else:
            del self._kept[block]

    def pop(self, count: int) -> list[int]:
        """Take out the next to be evicted, at most `len(self)`."""
        return [self.idle.popitem(last=False)[0] for _ in range(count)]

    def pin(self, blocks: Iterable[int]) -> None:
        """None of these is evicted any more."""
        for block in blocks:
            self.pinned.add(block)
            if block in self.idle:
                del self.idle[block]
                self._kept[block] = None

    def unpin(self, blocks: Iterable[int]) -> None:
        """They may be evicted again: cached ones as if they were used just now."""
        for block in blocks:
            self.pinned.discard(block)
            if block in self._kept:
                del self._kept[block]
                self.idle[block] = None

    def clear(self) -> list[int]:
        """Nothing is cached or pinned any more; returns what was cached, the last to be evicted first."""
        blocks = self.cached[::-1]
        self.idle.clear()
        self._kept.clear()
        self.pinned.clear()
        return blocks

    def check(self) -> None:
        """Raise AssertionError where what is kept does not agree with itself."""
        assert self._kept.keys() <= self.pinned, "a block stands aside that is not pinned"
        assert not self.idle.keys() & self.pinned, "a pinned block is to be evicted"
