"""Checks that a model passed at an earlier start, stored in the cache folder.

A record is stored once a model has passed all checks, under an identity that includes the model's files, kvscope's
source files and the processor (`model_identity`). If any of them changes, all checks are made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kvscope_engine.json_cache import read_entry, write_entry

_KIND: Final = "checks"


class CheckRecord(msgspec.Struct, frozen=True):
    """Results of the checks of a model whose attention and fused layers gave the results of the original model."""

    parts: dict[str, bool]
    """Whether a part's replacement was equivalent, by the part's name and the number of the attempt."""
    float32_residual: bool
    """Whether the results stayed correct with a residual stream in float32."""


class PassedChecks:
    """Checks of one model: those stored under `identity`, and those made by this start.

    Without an identity, nothing is read or stored. `report` is called with a line about a damaged record. Without
    `may_store`, such as while fewer threads compute than `identity` says, a record is only read.
    """

    def __init__(
        self, identity: str = "", report: Callable[[str], None] = lambda line: None, *, may_store: bool = True
    ) -> None:
        self._identity = identity
        self._may_store = may_store
        self._record = _read(identity, report) if identity else None
        self._parts: dict[str, bool] = {}
        self._num_attempts = Counter[str]()

    @property
    def record(self) -> CheckRecord | None:
        """Record of an earlier start; None if there is none and all checks have to be made."""
        return self._record

    def is_equivalent(self, part: str, check: Callable[[], bool]) -> bool:
        """Return the result of the next attempt to replace `part`: that of `check`, or the stored one.

        With a record, a part that is not in it keeps its original: the whole model will not be compared.
        """
        name = f"{part} {self._num_attempts[part]}"
        self._num_attempts[part] += 1
        if self._record is not None:
            return self._record.parts.get(name, False)
        self._parts[name] = check()
        return self._parts[name]

    def discard(self) -> None:
        """Neither use nor store a record: models of this kind are checked at each start."""
        self._identity, self._record = "", None

    def store(self, *, float32_residual: bool) -> None:
        """Store that the model passed all checks, unless that is stored already."""
        if self._identity and self._may_store and self._record is None:
            record = CheckRecord(self._parts, float32_residual)
            write_entry(_KIND, self._identity, msgspec.to_builtins(record))


def _read(identity: str, report: Callable[[str], None]) -> CheckRecord | None:
    stored = read_entry(_KIND, identity, report)
    try:
        return None if stored is None else msgspec.convert(stored, CheckRecord)
    except msgspec.ValidationError:
        return None
