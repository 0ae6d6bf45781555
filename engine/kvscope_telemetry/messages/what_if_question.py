"""Question to `kvscope-engine what-if` about all recorded requests: "would twice the blocks have helped?"

    {"question": {"recording": "/tmp/run.mcap", "options": ["--blocks-times", "2"]}}

The command simulates the recorded requests with the recorded settings and with the options, which are those of
`kvscope-engine simulate`. It writes `WhatIfProgress` lines, then a `WhatIfComparison`, or a `Complaint`.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

MAX_ERROR: Final = 0.2
"""Largest error of the simulation of the recorded settings at which an answer counts as reliable."""
CHECKED: Final = ("ttft_p50_s", "ttft_p99_s", "tokens_per_s", "num_preemptions")
"""Figures of which the error decides whether an answer is reliable."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class WhatIfQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    recording: Text
    """Path of a recording, or of the folder with the recent history of a live session."""
    options: Annotated[list[Text], msgspec.Meta(max_length=64)]


class WhatIfProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    share_done: float
    """Share of the simulated requests that have ended, 0 to 1."""


class WhatIfFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run; None if unknown. All runs of a comparison take them from the same requests."""

    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    """Median of the requests' mean times per output token after the first."""
    tpot_p99_s: float | None = None
    tokens_per_s: float | None = None
    """Output tokens of the ended requests, per second from the first arrival to the last end."""
    num_preemptions: float | None = None
    num_refused: int = 0
    """Requests that cannot run with these settings."""


class WhatIfComparison(msgspec.Struct, frozen=True, kw_only=True):
    measured: WhatIfFigures
    unchanged: WhatIfFigures
    """Simulation of the recorded settings."""
    changed: WhatIfFigures
    num_requests: int
    num_runs: int = 1
    """Number of simulations of which each figure is the median. They differ in the variation of step times."""
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> dict[str, float | None]:
        """Relative error of each figure in `CHECKED` for the recorded settings; None if it was not measured."""
        return {name: relative_error(getattr(self.measured, name), getattr(self.unchanged, name)) for name in CHECKED}

    @property
    def is_reliable(self) -> bool:
        return all(error is None or error <= MAX_ERROR for error in self.errors.values())


def relative_error(measured: float | None, simulated: float | None) -> float | None:
    """Return how much a simulated figure differs from the measured one, relative to it; infinite if only the measured
    figure is 0, and None if one is unknown.
    """
    if measured is None or simulated is None:
        return None
    if not measured:
        return 0.0 if not simulated else math.inf
    return abs(simulated - measured) / measured
