"""Builds the prefix tree of the state shown: large trees on a thread, and at a limited rate.

Owns the thread and the copy of the ledger that it reads. Imports no Qt; its owner polls it until it `is_loaded`.
"""

from __future__ import annotations

import time
from typing import Final

from kvscope_app.session.background import Background
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.cached_blocks import LedgerCopy
from kvscope_telemetry.prefixes.tree import PrefixTree, build

MAX_SYNC_ROWS: Final = 2048
"""Maximum number of rows for which a tree is built synchronously, in about a millisecond."""
_REST_FACTOR: Final = 10
"""A tree is not rebuilt for this many times the duration of its build."""
_MIN_REST_S: Final = 0.25
_AFTER_FAILURE_S: Final = 5.0
"""Seconds before a failed build is retried, for example after running out of memory."""


class PrefixTreeBuilder:
    """Builder of prefix trees. Call `update` with the mirror whenever it changes.

    `tree` is the last completed tree, which may be that of an earlier state of the mirror.
    """

    def __init__(self) -> None:
        self.tree: PrefixTree | None = None
        self.failure = ""
        """Error message of the last build, "" if it succeeded."""
        self.group: int | None = None
        """KV group whose prefixes the next tree contains; None: there is a single group."""
        self.step = 0
        """Step of `tree`."""
        self.epoch: int | None = None
        self._copy = LedgerCopy()
        self._work: Background[PrefixTree | None] | None = None
        self._building_for: tuple[object, ...] = ()
        self._built_for: tuple[object, ...] = ()
        self._moment: tuple[int, int | None] = (0, None)
        self._began_s = 0.0
        self._rest_until_s = 0.0

    @property
    def is_loaded(self) -> bool:
        """Whether no tree is being built or waiting to be built."""
        return self._work is None and self._built_for == self._building_for

    @property
    def is_working(self) -> bool:
        return self._work is not None

    def update(self, mirror: Mirror) -> bool:
        """Start building a tree of `mirror` if necessary. Returns whether there is a new tree."""
        has_news = self._finish_build()
        wanted = (id(mirror), mirror.epoch, mirror.seq, self.group)
        if self._work is not None or wanted == self._built_for:
            return has_news
        self._building_for = wanted
        if time.monotonic() < self._rest_until_s and (self.failure or not self._is_other(wanted)):
            return has_news
        return self._start_build(mirror) or has_news

    def close(self) -> None:
        """Cancel the thread and ignore its result."""
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _is_other(self, wanted: tuple[object, ...]) -> bool:
        """Whether another mirror or group is wanted: the user navigated there and is waiting."""
        return wanted[:2] != self._built_for[:2] or wanted[3:] != self._built_for[3:]

    def _start_build(self, mirror: Mirror) -> bool:
        num_rows = mirror.num_rows
        if num_rows > MAX_SYNC_ROWS and not self._copy.fits(mirror.ledger):
            self._work = Background(lambda watch: self._reserve(num_rows), "kvscope-prefixes")
            return False
        self._copy.copy_from(mirror.ledger)
        self._moment = (mirror.step, mirror.epoch)
        self._began_s = time.monotonic()
        if num_rows <= MAX_SYNC_ROWS:
            self._set_tree(build(self._copy.blocks(self.group)))
            return True
        group = self.group
        self._work = Background(lambda watch: build(self._copy.blocks(group)), "kvscope-prefixes")
        return False

    def _reserve(self, num_rows: int) -> PrefixTree | None:
        self._copy.reserve(num_rows)
        return None

    def _finish_build(self) -> bool:
        work = self._work
        if work is None or not work.is_finished:
            return False
        self._work, self.failure = None, work.failure
        if work.failure:
            self._rest_until_s = time.monotonic() + _AFTER_FAILURE_S
            return False
        if work.result is None:  # the buffer for the copy has been allocated
            return False
        self._set_tree(work.result)
        return True

    def _set_tree(self, tree: PrefixTree) -> None:
        self.tree, self._built_for = tree, self._building_for
        self.step, self.epoch = self._moment
        took_s = time.monotonic() - self._began_s
        self._rest_until_s = time.monotonic() + max(_MIN_REST_S, _REST_FACTOR * took_s)
