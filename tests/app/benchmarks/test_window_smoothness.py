"""What measures a window from inside: knocks from another process, and the time of those it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks.desktop_harness import cpu_of_rings_s
from benchmarks.window_smoothness import KNOCK_PROGRAM, STAMP, KnockMeter, ResidentMemory

WAIT_MS = 120_000


def test_knocks_come_from_a_process_of_their_own_and_end_with_it(qapp, qtbot):
    knocks = KnockMeter()
    process = knocks.process
    qtbot.waitUntil(lambda: len(knocks.waited_ns) >= 3, timeout=WAIT_MS)
    assert all(waited_ns >= 0 for waited_ns in knocks.waited_ns)
    knocks.close()
    assert process.poll() is not None


def test_knocking_process_ends_when_nobody_reads_its_output():
    process = subprocess.Popen([sys.executable, "-S", "-c", KNOCK_PROGRAM], stdout=subprocess.PIPE)
    process.stdout.read(STAMP.size)
    process.stdout.close()
    assert process.wait(timeout=WAIT_MS / 1000) == 0


@pytest.mark.parametrize("kept", [None, SimpleNamespace(ring=SimpleNamespace(pid=0))])
def test_sessions_that_keep_nothing_take_nothing(kept):
    assert cpu_of_rings_s([SimpleNamespace(kept=kept)]) == 0.0


def test_memory_is_told_of_first_last_and_most(qapp, qtbot):
    asked = []

    def pids():
        asked.append(time.monotonic())
        return [os.getpid()]

    sizes = ResidentMemory(pids, every_ms=1)
    held = bytearray(64 << 20)
    qtbot.waitUntil(lambda: len(asked) > 20, timeout=WAIT_MS)
    del held
    first, last, most = sizes.stop()
    assert most >= max(first, last) > 1.0
    assert ResidentMemory(lambda: [2**31 - 1]).stop() == (0.0, 0.0, 0.0)  # no such process
