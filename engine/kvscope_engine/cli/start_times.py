"""Measures what each part of an engine's start costs, for `--debug`."""

from __future__ import annotations

import sys
import time

from kvscope_engine.model.loader.download.progress import IMPORT, ProgressCallback
from kvscope_engine.text_table import table
from kvscope_telemetry.messages.telemetry import Progress

_READY = "ready"
_LABELS = {"": "Python, options", IMPORT: "import torch, transformers, kvscope; read the configuration"}


class StartTimes:
    """Passes progress on to `forward`, and prints the time of each stage to standard error when the engine is ready.

    The first row is the time since the process was created; in it, only processor time is known.
    """

    def __init__(self, forward: ProgressCallback) -> None:
        self._forward = forward
        self._stage = ""
        self._began_wall_s, self._began_cpu_s = time.perf_counter(), 0.0
        self._rows: dict[str, tuple[float, float]] = {}

    def __call__(self, progress: Progress) -> None:
        stage = f"{progress.stage} {progress.detail}".strip()
        if stage != self._stage:
            self._end_stage(stage)
        self._forward(progress)
        if progress.stage == _READY:
            print(self._table(), file=sys.stderr)

    def _end_stage(self, next_stage: str) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        label = _LABELS.get(self._stage, self._stage)
        before = self._rows.get(label, (0.0, 0.0))
        self._rows[label] = (before[0] + wall_s - self._began_wall_s, before[1] + cpu_s - self._began_cpu_s)
        self._stage, self._began_wall_s, self._began_cpu_s = next_stage, wall_s, cpu_s

    def _table(self) -> str:
        rows = [
            [label, "–" if index == 0 else f"{wall_s:.2f} s", f"{cpu_s:.2f} s"]
            for index, (label, (wall_s, cpu_s)) in enumerate(self._rows.items())
        ]
        return table(["part of the start", "time", "processor time"], rows)
