"""The turns of a conversation as a chat template reads them: with an end to the time it may take over them.

A template is the model's own program, its turns are a client's: one that looks through all turns at each of them
takes minutes for some thousands. Nothing interrupts a template from outside, but whatever it does with many turns
comes back to them, and then the time is looked at. It is the thread's own time, so a busy machine refuses nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, SupportsIndex

from kvscope_telemetry.errors import BadInput

MAX_TEMPLATE_S: Final = 2.0


class BoundedTurns(list[dict[str, Any]]):
    """A list, and its slices too, that raises BadInput when it is read after the time is over."""

    def __init__(self, turns: Iterable[dict[str, Any]], max_s: float, end_s: float | None = None) -> None:
        super().__init__(turns)
        self._max_s = max_s
        self._end_s = time.thread_time() + max_s if end_s is None else end_s

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for turn in super().__iter__():
            self._check()
            yield turn

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._check()
        found: Any = super().__getitem__(index)
        return BoundedTurns(found, self._max_s, self._end_s) if isinstance(index, slice) else found

    def _check(self) -> None:
        if time.thread_time() > self._end_s:
            raise BadInput(f"it takes more than {self._max_s:g} s for so many messages: fewer are accepted")
