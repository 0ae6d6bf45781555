"""The benchmark of an idle window: the ways that a window rests, and how it reads a process's time."""

from __future__ import annotations

import math
import os
import time

import pytest

from benchmarks.desktop_harness import process_cpu_s, run_while
from benchmarks.window_idle import EVERY_VIEW, ways_to_rest


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc here")
def test_a_process_is_read_as_the_system_tells_it():
    before_s = process_cpu_s(os.getpid())
    assert before_s >= 0
    while process_cpu_s(os.getpid()) <= before_s:
        sum(range(10_000))
    assert process_cpu_s(os.getpid()) <= time.process_time() + 1.0
    assert math.isnan(process_cpu_s(0))


def test_it_waits_until_something_is_so_and_not_for_ever(qapp):
    looks = iter([True, True, False])
    assert run_while(lambda: next(looks), 60)
    assert not run_while(lambda: True, 0)


def test_each_way_of_looking_is_undone(engine, session, make_window, qtbot):
    window = make_window(session, with_views=True, size=(1500, 900))
    ways = {name: (begin, end) for name, begin, end in ways_to_rest(window)}
    ways["paused"][0]()
    assert session.timeline.is_paused
    ways["paused"][1]()
    assert not session.timeline.is_paused
    ways["every_view"][0]()
    assert all(window.docks[name].isVisible() and window.docks[name].isFloating() for name in EVERY_VIEW)
