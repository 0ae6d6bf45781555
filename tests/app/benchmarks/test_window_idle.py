"""Tests of the benchmark of an idle window: its idle states and how it reads a process's CPU time."""

from __future__ import annotations

import math
import os
import time

import pytest

from benchmarks.desktop_harness import process_cpu_s, run_while
from benchmarks.window_idle import EVERY_VIEW, idle_modes


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc here")
def test_process_cpu_time_is_read_from_the_system_and_nan_if_unknown():
    before_s = process_cpu_s(os.getpid())
    assert before_s >= 0
    while process_cpu_s(os.getpid()) <= before_s:
        sum(range(10_000))
    assert process_cpu_s(os.getpid()) <= time.process_time() + 1.0
    assert math.isnan(process_cpu_s(0))


def test_run_while_ends_when_the_condition_is_false_or_at_the_timeout(qapp):
    results = iter([True, True, False])
    assert run_while(lambda: next(results), 60)
    assert not run_while(lambda: True, 0)


def test_idle_benchmark_pauses_and_resumes_the_session_and_opens_every_view(engine, session, make_window, qtbot):
    window = make_window(session, with_views=True, size=(1500, 900))
    modes = {name: (enter, leave) for name, enter, leave in idle_modes(window)}
    modes["paused"][0]()
    assert session.timeline.is_paused
    modes["paused"][1]()
    assert not session.timeline.is_paused
    modes["every_view"][0]()
    assert all(window.docks[name].isVisible() and window.docks[name].isFloating() for name in EVERY_VIEW)
