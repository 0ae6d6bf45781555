"""Measure how smoothly the window draws a pool of a million blocks that changes 5,000 times a second.

The real window is attached to a simulated engine. Measured inside its process: paints, latency of events, processor
time and memory. Measured in new processes: the time from the command to the first exposed window.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PySide6.QtCore import QEvent, QObject, QSocketNotifier, QTimer
from PySide6.QtWidgets import QWidget
from tests.simulated_engine.command import COMMAND

from benchmarks.command_line import run_benchmark
from benchmarks.desktop_harness import (
    WINDOW_SIZE,
    cpu_of_rings_s,
    open_desktop,
    pids_of_rings,
    print_result,
    run_for,
    run_until,
)
from kvscope_app.desktop import STARTUP_PROBE
from kvscope_app.session.session import Session
from kvscope_telemetry.errors import KvscopeError

TIMESTAMP: Final = struct.Struct("<q")
"""Format of a timestamp: the monotonic time in ns at which another process wrote it."""
TIMESTAMP_PROGRAM: Final = """
import os, struct, time
due_s = time.monotonic()
try:
    while True:
        os.write(1, struct.pack("<q", time.monotonic_ns()))
        due_s = max(due_s + 0.01, time.monotonic() - 1.0)
        time.sleep(max(0.0, due_s - time.monotonic()))
except BrokenPipeError:
    pass
"""
"""Program that writes a timestamp 100 times a second until its output is closed.

Like a user's input, timestamps reach the window from outside through a file descriptor, so that stalls of the whole
process are measured as well.
"""
_STARTUP_TIMEOUT_S: Final = 60
_WARM_UP_S: Final = 2.0
SAMPLE_INTERVAL_MS: Final = 1_000
_NUM_PARTS: Final = 10
"""Number of parts into which memory samples are divided. The first and last values are medians of a part, so
that momentary buffers do not count.
"""
_READ_BYTES: Final = 512 * TIMESTAMP.size
_FLUSH_S: Final = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--blocks", type=int, default=1_000_000, metavar="N", help="blocks of the pool (default: 1000000)")
    add("--host-blocks", type=int, default=0, metavar="N", help="blocks of a host tier (default: 0, none)")
    add("--disk-blocks", type=int, default=0, metavar="N", help="blocks of a disk tier (default: 0, none)")
    add("--rate", type=float, default=5000.0, metavar="HZ", help="telemetry frames per second (default: 5000)")
    add("--seconds", type=float, default=10.0, metavar="S", help="how long to measure (default: 10)")
    add("--startup-runs", type=int, default=3, metavar="N", help="desktop starts to time (default: 3)")
    add("--map-only", action="store_true", help="close the docked views: page map only")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    with _simulated_engine(args) as endpoint:
        result = {"blocks": args.blocks, "rate": args.rate, **_smoothness(endpoint, args)}
        if args.startup_runs:
            result |= _startup(endpoint, args.startup_runs)
    print_result(result, args.json)
    return 0


@contextmanager
def _simulated_engine(args: argparse.Namespace) -> Iterator[str]:
    """Serve a simulated pool that changes constantly. Yields the endpoint."""
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        endpoint = f"ipc://{folder}/telemetry"
        command = [*COMMAND, "--endpoint", endpoint, "--until-eof"]
        command += ["--blocks", str(args.blocks), "--rate", str(args.rate)]
        command += ["--host-blocks", str(args.host_blocks), "--disk-blocks", str(args.disk_blocks)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "a pipe"
            assert process.stdin is not None, "a pipe"
            if not process.stdout.readline().startswith("serving"):
                raise KvscopeError("the simulated engine did not start")
            try:
                yield endpoint
            finally:
                process.stdin.close()
                process.wait(timeout=10)


def _smoothness(endpoint: str, args: argparse.Namespace) -> dict[str, object]:
    with open_desktop() as desktop:
        window = desktop.open_window(endpoint)
        window.resize(*WINDOW_SIZE)
        run_until(window.views_loaded)
        if args.map_only:
            for dock in window.docks.values():
                dock.hide()
        run_for(_WARM_UP_S)
        if window.session.mirror.hello is None:
            raise KvscopeError("no telemetry came from the simulated engine")
        meter = Meter(window.page_map.canvas, window.session)
        run_for(args.seconds)
        return dataclasses.asdict(meter.stop())


def _startup(endpoint: str, runs: int) -> dict[str, object]:
    """Return the seconds from the command to the first exposed window, and the heavy modules (torch, the
    engine) that were imported by then. There should be none.
    """
    starts = [_start_desktop(endpoint) for _ in range(runs)]
    seconds = sorted(seconds for seconds, _ in starts)
    return {
        "first_expose_s": seconds[len(seconds) // 2],
        "first_expose_max_s": seconds[-1],
        "heavy_modules_imported": sorted({name for _, names in starts for name in names}),
    }


def _start_desktop(endpoint: str) -> tuple[float, list[str]]:
    command = [sys.executable, "-m", "kvscope_app.main", "--attach", endpoint]
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        environment = {**os.environ, "XDG_CONFIG_HOME": folder, STARTUP_PROBE: str(time.monotonic_ns())}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_STARTUP_TIMEOUT_S)
            figures = json.loads(done.stdout.splitlines()[-1])
            return float(figures["first_expose_s"]), list(figures["heavy_modules"])
        except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError) as error:
            raise KvscopeError(f"the window did not come up: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Smoothness:
    seconds: float
    frames_painted_per_s: float
    frame_interval_median_ms: float
    frame_interval_p99_ms: float
    event_latency_p50_ms: float
    event_latency_p99_ms: float
    event_latency_max_ms: float
    """Maximum latency from another process's write to a file descriptor to its handling on the GUI thread,
    measured 100 times a second.
    """
    cpu_percent: float
    """Percent of one core, over all threads of the desktop."""
    ring_cpu_percent: float
    ring_messages_lost: int
    """Number of messages dropped since the window opened because the process that writes the recent history was
    too slow.
    """
    telemetry_frames_per_s: float
    telemetry_frames_lost: int
    resyncs: int
    resident_first_mb: float
    """Resident memory of the desktop at the beginning: the median of the first tenth of the samples. The
    `ring_…` fields are about the process that writes the recent history.
    """
    resident_last_mb: float
    resident_max_mb: float
    ring_resident_first_mb: float
    ring_resident_last_mb: float
    ring_resident_max_mb: float


class EventLatencyMeter:
    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        command = (sys.executable, "-S", "-c", TIMESTAMP_PROGRAM)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self.process.stdout is not None, "a pipe"
        self._pipe = self.process.stdout
        self._notifier = QSocketNotifier(self._pipe.fileno(), QSocketNotifier.Type.Read)
        self._notifier.activated.connect(self._read_timestamps)

    def close(self) -> None:
        self._notifier.setEnabled(False)
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def _read_timestamps(self) -> None:
        data = os.read(self._pipe.fileno(), _READ_BYTES)
        if not data:
            self._notifier.setEnabled(False)
        now_ns = time.monotonic_ns()
        self.latencies_ns += [now_ns - stamp for (stamp,) in TIMESTAMP.iter_unpack(data)]


class _PaintWatch(QObject):
    def __init__(self) -> None:
        super().__init__()
        self.painted_ns: list[int] = []

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint:
            self.painted_ns.append(time.monotonic_ns())
        return False


class Meter:
    def __init__(self, canvas: QWidget, session: Session) -> None:
        self._canvas = canvas
        self._session = session
        self._paints, self._event_latency = _PaintWatch(), EventLatencyMeter()
        canvas.installEventFilter(self._paints)
        self._began = time.monotonic_ns()
        self._cpu_s, self._ring_s = time.process_time(), cpu_of_rings_s([session])
        self._status = session.source.status
        self._resident = ResidentMemory(lambda: [os.getpid()])
        self._ring_resident = ResidentMemory(lambda: pids_of_rings([session]))

    def stop(self) -> Smoothness:
        self._event_latency.close()
        self._canvas.removeEventFilter(self._paints)
        seconds = (time.monotonic_ns() - self._began) / 1e9
        status = self._session.source.status
        cpu_s, ring_s = time.process_time(), cpu_of_rings_s([self._session])
        resident, ring_resident = self._resident.stop(), self._ring_resident.stop()
        num_ring_lost = _num_ring_lost(self._session)
        intervals = _milliseconds(np.diff(self._paints.painted_ns))
        latencies = _milliseconds(np.array(self._event_latency.latencies_ns))
        return Smoothness(
            seconds=round(seconds, 2),
            frames_painted_per_s=round(len(self._paints.painted_ns) / seconds, 1),
            frame_interval_median_ms=_quantile(intervals, 0.5),
            frame_interval_p99_ms=_quantile(intervals, 0.99),
            event_latency_p50_ms=_quantile(latencies, 0.5),
            event_latency_p99_ms=_quantile(latencies, 0.99),
            event_latency_max_ms=_quantile(latencies, 1.0),
            cpu_percent=round(100 * (cpu_s - self._cpu_s) / seconds, 1),
            ring_cpu_percent=round(100 * (ring_s - self._ring_s) / seconds, 1),
            ring_messages_lost=num_ring_lost,
            telemetry_frames_per_s=round((status.frames_received - self._status.frames_received) / seconds, 1),
            telemetry_frames_lost=status.frames_dropped - self._status.frames_dropped,
            resyncs=status.resyncs - self._status.resyncs,
            resident_first_mb=resident[0],
            resident_last_mb=resident[1],
            resident_max_mb=resident[2],
            ring_resident_first_mb=ring_resident[0],
            ring_resident_last_mb=ring_resident[1],
            ring_resident_max_mb=ring_resident[2],
        )


def _num_ring_lost(session: Session) -> int:
    if session.disk_history is None:
        return 0
    session.disk_history.ring.flush(_FLUSH_S)
    return session.disk_history.ring.num_dropped


def _milliseconds(
    values_ns: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return values_ns / 1e6


def _quantile(values: np.ndarray[tuple[int], np.dtype[np.float64]], share: float) -> float:
    return round(float(np.quantile(values, share)), 2) if values.size else float("nan")


class ResidentMemory:
    """Samples the resident memory of processes while the event loop runs, in MB, summed over the process ids
    `pids()`. It is 0 MB if the system does not report it.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], every_ms: int = SAMPLE_INTERVAL_MS) -> None:
        self._pids = pids
        self._samples: list[float] = []
        self._timer = QTimer()
        self._timer.setInterval(every_ms)
        self._timer.timeout.connect(self._sample)
        self._timer.start()
        self._sample()

    def stop(self) -> tuple[float, float, float]:
        """Stop sampling and return the first, last and maximum value in MB."""
        self._timer.stop()
        self._sample()
        length = max(1, len(self._samples) // _NUM_PARTS)
        first, last = np.median(self._samples[:length]), np.median(self._samples[-length:])
        return round(float(first), 1), round(float(last), 1), round(max(self._samples), 1)

    def _sample(self) -> None:
        self._samples.append(sum(_resident_mb(pid) for pid in self._pids()))


def _resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):  # it ended, or the system has no such file
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
