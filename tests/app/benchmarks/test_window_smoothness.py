"""Tests of the measurements of a window: event loop delay, CPU time of child processes, and resident memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks.desktop_harness import cpu_of_rings_s
from benchmarks.window_smoothness import TIMESTAMP, TIMESTAMP_PROGRAM, EventLatencyMeter, ResidentMemory

WAIT_MS = 120_000


def test_event_latency_meter_starts_a_process_and_ends_it_on_close(qapp, qtbot):
    meter = EventLatencyMeter()
    process = meter.process
    qtbot.waitUntil(lambda: len(meter.latencies_ns) >= 3, timeout=WAIT_MS)
    assert all(latency_ns >= 0 for latency_ns in meter.latencies_ns)
    meter.close()
    assert process.poll() is not None


def test_timestamp_process_exits_when_its_output_pipe_is_closed():
    process = subprocess.Popen([sys.executable, "-S", "-c", TIMESTAMP_PROGRAM], stdout=subprocess.PIPE)
    process.stdout.read(TIMESTAMP.size)
    process.stdout.close()
    assert process.wait(timeout=WAIT_MS / 1000) == 0


@pytest.mark.parametrize("disk_history", [None, SimpleNamespace(ring=SimpleNamespace(pid=0))])
def test_sessions_without_a_recent_history_use_no_cpu_time(disk_history):
    assert cpu_of_rings_s([SimpleNamespace(disk_history=disk_history)]) == 0.0


def test_resident_memory_reports_first_last_and_peak(qapp, qtbot):
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
