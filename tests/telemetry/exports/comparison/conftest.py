"""Runs without a file: an overview built from numbers per second, and a stand-in for their recording."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.telemetry.conftest import SteppedClock

from kvscope_telemetry.exports.comparison.comparison import Run
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Latency, Summary

START_NS = 1_000 * SECOND_NS
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> MakeRun:
    """Function that makes a run: `make_run(values, blocks=100)` with `values[i]` tokens, blocks in use and ms to the
    first token in second i.
    """

    def make(values: npt.NDArray[np.float64], blocks: int = 100) -> Run:
        hello = SimulatedEngine(num_blocks=blocks, epoch=9, clock=SteppedClock()).hello
        overview = SessionOverview()
        for second, value in enumerate(values):
            whole = round(float(value))
            overview.extend(
                [
                    Summary(
                        time_ns=START_NS + second * SECOND_NS,
                        epoch=9,
                        decode_tokens=whole,
                        prefill_tokens=10,
                        prompt_tokens=10,
                        cached_tokens=30,
                        finished=1,
                        active_blocks=whole,
                        peak_active_blocks=whole,
                        free_blocks=blocks - whole,
                        longest_free_run=(blocks - whole) // 2,
                        first_token=Latency(1, value / 1e3, value / 1e3, value / 1e3),
                    )
                ]
            )
        recording = SimpleNamespace(info=SimpleNamespace(hello=hello, epochs=(9,)))
        end_ns = START_NS + len(values) * SECOND_NS
        return Run(cast(Recording, recording), overview, Span(START_NS, START_NS, end_ns))

    return make
