"""Reports the progress of downloads, conversions and loading at a limited rate, and displays it on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, TextIO, TypeAlias

from tqdm import tqdm  # type: ignore[import-untyped]

from kvscope_telemetry.messages.telemetry import Progress
from kvscope_telemetry.printable import print_line

ProgressCallback: TypeAlias = Callable[[Progress], None]
MIN_INTERVAL_S: Final = 0.05
WAIT: Final = "wait"
IMPORT: Final = "import"
_LINES: Final = {
    IMPORT: "starting (torch and transformers take some seconds)",
    "compile": "compiling for this processor, once",
    "warm up": "making the model ready",
}
"""Lines that the terminal shows for work of unknown size, by stage."""


class Meter:
    """Counts the progress of one task and calls `callback` at the start, at most 20 times a second, and at the end."""

    def __init__(
        self, callback: ProgressCallback, stage: str, detail: str = "", total: int = 0, unit: str = ""
    ) -> None:
        self._callback = callback
        self._stage, self._detail, self._unit = stage, detail, unit
        self._total, self._done = total, 0
        self._next_s = 0.0

    def __enter__(self) -> Meter:
        self._report()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._done = max(self._done, self._total)
            self._report()

    def advance(self, count: int = 1) -> None:
        self.reach(self._done + count, self._total)

    def reach(self, done: int, total: int) -> None:
        changed = (done, total) != (self._done, self._total)
        self._done, self._total = done, total
        if changed and time.monotonic() >= self._next_s:
            self._report()

    def _report(self) -> None:
        self._next_s = time.monotonic() + MIN_INTERVAL_S
        self._callback(
            Progress(stage=self._stage, detail=self._detail, done=self._done, total=self._total, unit=self._unit)
        )


class TerminalProgress:
    """Callback that displays progress on standard error if it is a terminal.

    It draws a bar, or writes a line for work of unknown size. Lines about waiting are written even if standard error is
    not a terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._bar: tqdm | None = None
        self._current_work = ("", "")

    def __call__(self, progress: Progress) -> None:
        if progress.stage == WAIT:
            self.close()
            print_line(f"kvscope-engine: waiting {progress.detail}", file=self._stream)
            return
        if not self._stream.isatty():
            return
        work = (progress.stage, progress.detail)
        if work != self._current_work:
            self.close()
            if progress.total:
                self._bar = self._new_bar(progress)
            elif progress.stage != self._current_work[0] and (line := _LINES.get(progress.stage)):
                print(f"kvscope-engine: {line}", file=self._stream, flush=True)
            self._current_work = work
        if self._bar is not None:
            self._bar.total = progress.total
            self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        """End the bar. Its line remains visible."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _new_bar(self, progress: Progress) -> tqdm:
        in_bytes = progress.unit == "bytes"
        return tqdm(
            total=progress.total,
            desc=f"{progress.stage} {progress.detail}".strip(),
            unit="B" if in_bytes else f" {progress.unit}".rstrip(),
            unit_scale=in_bytes,
            unit_divisor=1024 if in_bytes else 1000,
            file=self._stream,
            dynamic_ncols=True,
            leave=True,
        )
