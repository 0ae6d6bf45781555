"""Measures a running window from inside: paints, waiting time of events, processor time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from PySide6.QtCore import QCoreApplication, QEvent, QObject
from PySide6.QtWidgets import QWidget

from kvscope_app.session.session import Session

PROBE_HZ: Final = 100.0


@dataclass(frozen=True, slots=True)
class Smoothness:
    """What was measured over `seconds` of steady running."""

    seconds: float
    frames_painted_per_s: float
    frame_interval_median_ms: float
    frame_interval_p99_ms: float
    event_latency_p50_ms: float
    event_latency_p99_ms: float
    event_latency_max_ms: float
    """From a posted event to its handling on the GUI thread, `PROBE_HZ` times a second."""
    cpu_percent: float
    """Of one core, all threads of the desktop."""
    telemetry_frames_per_s: float
    telemetry_frames_lost: int
    resyncs: int


class _Probe(QEvent):
    def __init__(self) -> None:
        super().__init__(QEvent.Type(QEvent.Type.User + 71))
        self.posted_ns = time.monotonic_ns()


class _ProbeReceiver(QObject):
    """Notes how long each probe waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_ns: list[int] = []

    def event(self, event: QEvent) -> bool:
        if isinstance(event, _Probe):
            self.waited_ns.append(time.monotonic_ns() - event.posted_ns)
            return True
        return super().event(event)


class _PaintWatch(QObject):
    """Notes when a widget is painted."""

    def __init__(self) -> None:
        super().__init__()
        self.painted_ns: list[int] = []

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint:
            self.painted_ns.append(time.monotonic_ns())
        return False


class Meter:
    """Starts to measure `canvas` and `session`; `stop` gives the result."""

    def __init__(self, canvas: QWidget, session: Session) -> None:
        self._canvas = canvas
        self._session = session
        self._paints, self._probes = _PaintWatch(), _ProbeReceiver()
        self._over = threading.Event()
        canvas.installEventFilter(self._paints)
        self._began = time.monotonic_ns()
        self._cpu_s = time.process_time()
        self._status = session.source.status
        self._poster = threading.Thread(target=self._post, name="kvscope-probe", daemon=True)
        self._poster.start()

    def stop(self) -> Smoothness:
        """End the measurement."""
        self._over.set()
        self._poster.join()
        self._canvas.removeEventFilter(self._paints)
        seconds = (time.monotonic_ns() - self._began) / 1e9
        status = self._session.source.status
        intervals = _milliseconds(np.diff(self._paints.painted_ns))
        waited = _milliseconds(np.array(self._probes.waited_ns))
        return Smoothness(
            seconds=round(seconds, 2),
            frames_painted_per_s=round(len(self._paints.painted_ns) / seconds, 1),
            frame_interval_median_ms=_quantile(intervals, 0.5),
            frame_interval_p99_ms=_quantile(intervals, 0.99),
            event_latency_p50_ms=_quantile(waited, 0.5),
            event_latency_p99_ms=_quantile(waited, 0.99),
            event_latency_max_ms=_quantile(waited, 1.0),
            cpu_percent=round(100 * (time.process_time() - self._cpu_s) / seconds, 1),
            telemetry_frames_per_s=round((status.frames_received - self._status.frames_received) / seconds, 1),
            telemetry_frames_lost=status.frames_dropped - self._status.frames_dropped,
            resyncs=status.resyncs - self._status.resyncs,
        )

    def _post(self) -> None:
        while not self._over.wait(1 / PROBE_HZ):
            QCoreApplication.postEvent(self._probes, _Probe())


def _milliseconds(
    values_ns: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return values_ns / 1e6


def _quantile(values: np.ndarray[tuple[int], np.dtype[np.float64]], share: float) -> float:
    return round(float(np.quantile(values, share)), 2) if values.size else float("nan")
