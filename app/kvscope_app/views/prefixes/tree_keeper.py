"""The newest prefix tree of what is shown: built on a thread where that takes long, and no more often than worthwhile.

Owns the thread and the copy of the ledger that it reads. Knows no Qt; who holds it comes back until it `is_settled`.
"""

from __future__ import annotations

import time
from typing import Final

from kvscope_app.session.background import Background
from kvscope_telemetry.prefixes.cached_blocks import LedgerCopy
from kvscope_telemetry.prefixes.tree import PrefixTree, build
from kvscope_telemetry.state.mirror import Mirror

AT_ONCE_ROWS: Final = 2048
"""Trees of so many rows are made on the spot, in a millisecond or so."""
_REST_SHARE: Final = 10
"""A tree that took a second is not made again for so many."""
_LEAST_REST_S: Final = 0.25
_AFTER_FAILURE_S: Final = 5.0
"""Until it is tried again, as where there is no memory for it."""


class TreeKeeper:
    """Give it the mirror to `follow` as often as it changes; `tree` is of a moment of it."""

    def __init__(self) -> None:
        self.tree: PrefixTree | None = None
        self.failure = ""
        """Why the last could not be made, empty while all is well."""
        self.group: int | None = None
        """The KV group whose prefixes the next tree is made of; None: there is one."""
        self.step = 0
        """When that was."""
        self.epoch: int | None = None
        self._copy = LedgerCopy()
        self._work: Background[PrefixTree | None] | None = None
        self._working_on: tuple[object, ...] = ()
        self._made_of: tuple[object, ...] = ()
        self._moment: tuple[int, int | None] = (0, None)
        self._began_s = 0.0
        self._rest_until_s = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being made, and nothing waits to be."""
        return self._work is None and self._made_of == self._working_on

    @property
    def is_working(self) -> bool:
        """Whether a tree is being made now."""
        return self._work is not None

    def follow(self, mirror: Mirror) -> bool:
        """Look at `mirror`: whether there is a new tree."""
        has_news = self._take_made()
        wanted = (id(mirror), mirror.epoch, mirror.seq, self.group)
        if self._work is not None or wanted == self._made_of:
            return has_news
        self._working_on = wanted
        if time.monotonic() < self._rest_until_s and (self.failure or not self._is_other(wanted)):
            return has_news
        return self._begin(mirror) or has_news

    def close(self) -> None:
        """End the thread; what it makes is not wanted."""
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _is_other(self, wanted: tuple[object, ...]) -> bool:
        """Whether it is another mirror or group: a person went elsewhere, and waits."""
        return wanted[:2] != self._made_of[:2] or wanted[3:] != self._made_of[3:]

    def _begin(self, mirror: Mirror) -> bool:
        num_rows = mirror.num_rows
        if num_rows > AT_ONCE_ROWS and not self._copy.fits(mirror.ledger):
            self._work = Background(lambda watch: self._make_room(num_rows), "kvscope-prefixes")
            return False
        self._copy.take(mirror.ledger)
        self._moment = (mirror.step, mirror.epoch)
        self._began_s = time.monotonic()
        if num_rows <= AT_ONCE_ROWS:
            self._keep(build(self._copy.blocks(self.group)))
            return True
        group = self.group
        self._work = Background(lambda watch: build(self._copy.blocks(group)), "kvscope-prefixes")
        return False

    def _make_room(self, num_rows: int) -> PrefixTree | None:
        self._copy.make_room(num_rows)
        return None

    def _take_made(self) -> bool:
        work = self._work
        if work is None or not work.is_over:
            return False
        self._work, self.failure = None, work.failure
        if work.failure:
            self._rest_until_s = time.monotonic() + _AFTER_FAILURE_S
            return False
        if work.made is None:  # there is room for a copy now
            return False
        self._keep(work.made)
        return True

    def _keep(self, tree: PrefixTree) -> None:
        self.tree, self._made_of = tree, self._working_on
        self.step, self.epoch = self._moment
        took_s = time.monotonic() - self._began_s
        self._rest_until_s = time.monotonic() + max(_LEAST_REST_S, _REST_SHARE * took_s)
