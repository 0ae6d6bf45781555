"""Builds the prefix tree of the shown state. Large trees are built on a thread, and at a limited rate.

Owns the thread and the copy of the ledger that it reads. Imports no Qt; the owner calls `update` until `is_loaded`.
"""

from __future__ import annotations

import time
from typing import Final

from kvscope_app.session.background import Background
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.cached_blocks import LedgerCopy
from kvscope_telemetry.prefixes.tree import PrefixTree, build

MAX_SYNC_ROWS: Final = 2048
"""Maximum number of ledger rows for which a tree is built on the caller's thread, in about a millisecond."""
_INTERVAL_FACTOR: Final = 10
"""Minimum time between two builds, as a multiple of the duration of a build."""
_MIN_INTERVAL_S: Final = 0.25
_RETRY_S: Final = 5.0
"""Seconds after which a failed build is retried, for example after memory ran out."""


class PrefixTreeBuilder:
    """Builder of prefix trees. Call `update` with the mirror whenever it changed.

    `tree` is the last completed tree, which may be of an earlier state of the mirror.
    """

    def __init__(self) -> None:
        self.tree: PrefixTree | None = None
        self.failure = ""
        """Error message of the last build, or "" if it succeeded."""
        self.group: int | None = None
        """KV group whose prefixes the next tree contains; None if the engine has a single group."""
        self.step = 0
        self.epoch: int | None = None
        self._copy = LedgerCopy()
        self._work: Background[PrefixTree | None] | None = None
        self._building_for: tuple[object, ...] = ()
        self._built_for: tuple[object, ...] = ()
        self._copied_state: tuple[int, int | None] = (0, None)
        self._start_s = 0.0
        self._next_build_s = 0.0

    @property
    def is_loaded(self) -> bool:
        """Whether `tree` is up to date: no tree is being built and none is due."""
        return self._work is None and self._built_for == self._building_for

    @property
    def is_working(self) -> bool:
        return self._work is not None

    def update(self, mirror: Mirror) -> bool:
        """Start building a tree of `mirror` if it is due. Returns whether `tree` is a new tree."""
        is_new = self._finish_build()
        state = (id(mirror), mirror.epoch, mirror.seq, self.group)
        if self._work is not None or state == self._built_for:
            return is_new
        self._building_for = state
        if time.monotonic() < self._next_build_s and (self.failure or not self._is_other_tree(state)):
            return is_new
        return self._start_build(mirror) or is_new

    def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _is_other_tree(self, state: tuple[object, ...]) -> bool:
        """Whether `state` differs from that of `tree` in its mirror, engine start or KV group, so that the user is
        waiting for the new tree.
        """
        return state[:2] != self._built_for[:2] or state[3:] != self._built_for[3:]

    def _start_build(self, mirror: Mirror) -> bool:
        num_rows = mirror.num_rows
        if num_rows > MAX_SYNC_ROWS and not self._copy.fits(mirror.ledger):
            self._work = Background(lambda watch: self._reserve(num_rows), "kvscope-prefixes")
            return False
        self._copy.copy_from(mirror.ledger)
        self._copied_state = (mirror.step, mirror.epoch)
        self._start_s = time.monotonic()
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
            self._next_build_s = time.monotonic() + _RETRY_S
            return False
        if work.result is None:  # the buffer for the copy has been allocated
            return False
        self._set_tree(work.result)
        return True

    def _set_tree(self, tree: PrefixTree) -> None:
        self.tree, self._built_for = tree, self._building_for
        self.step, self.epoch = self._copied_state
        duration_s = time.monotonic() - self._start_s
        self._next_build_s = time.monotonic() + max(_MIN_INTERVAL_S, _INTERVAL_FACTOR * duration_s)
