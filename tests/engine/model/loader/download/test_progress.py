"""Progress events are rate-limited, complete at the end, and drawn only on a terminal."""

from __future__ import annotations

import io

import pytest

from kvscope_engine.model.loader.download import progress as progress_module
from kvscope_engine.model.loader.download.progress import WAIT, Meter, TerminalProgress
from kvscope_telemetry.messages.telemetry import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which tests change."""
    now = [100.0]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    monkeypatch.setattr(progress_module, "time", Time)
    return now


def test_progress_meter_reports_the_start_and_the_end(clock: list[float], progress_events: list[Progress]) -> None:
    with Meter(progress_events.append, "load", "x", 100, "tensors") as meter:
        for _ in range(100):
            meter.advance()
    assert [progress.done for progress in progress_events] == [0, 100]
    assert progress_events[-1] == Progress(stage="load", detail="x", done=100, total=100, unit="tensors")


def test_at_most_twenty_events_per_second(clock: list[float], progress_events: list[Progress]) -> None:
    with Meter(progress_events.append, "load", total=1000) as meter:
        for _ in range(1000):
            clock[0] += 0.001
            meter.advance()
    assert 18 <= len(progress_events) <= 22


def test_unchanged_progress_is_not_reported(clock: list[float], progress_events: list[Progress]) -> None:
    with Meter(progress_events.append, "download", total=9) as meter:
        for _ in range(10):
            clock[0] += 1
            meter.reach(3, 9)
    assert [progress.done for progress in progress_events] == [0, 3, 9]


def test_progress_that_fails_is_not_reported_as_complete(progress_events: list[Progress]) -> None:
    with pytest.raises(ZeroDivisionError), Meter(progress_events.append, "load", total=10):
        _ = 1 / 0
    assert [progress.done for progress in progress_events] == [0]


def test_progress_is_shown_as_a_bar_on_a_terminal() -> None:
    terminal = Terminal()
    show = TerminalProgress(terminal)
    show(Progress(stage="download", detail="model", done=0, total=2048, unit="bytes"))
    show(Progress(stage="download", detail="model", done=2048, total=2048, unit="bytes"))
    show(Progress(stage="load", detail="weights", done=1, total=3, unit="tensors"))
    show(Progress(stage="ready"))
    show.close()
    written = terminal.getvalue()
    assert "download model" in written
    assert "100%" in written
    assert "2.00k" in written
    assert "load weights" in written


def test_terminal_shows_work_of_unknown_size() -> None:
    terminal = Terminal()
    show = TerminalProgress(terminal)
    for stage, detail in (("import", ""), ("compile", ""), ("warm up", ""), ("warm up", "products"), ("ready", "")):
        show(Progress(stage=stage, detail=detail))
    first, second, third = terminal.getvalue().splitlines()
    assert first.startswith("kvscope-engine: starting")
    assert second == "kvscope-engine: compiling for this processor, once"
    assert third == "kvscope-engine: making the model ready"


def test_progress_is_not_written_to_a_stream_that_is_no_terminal() -> None:
    stream = io.StringIO()
    show = TerminalProgress(stream)
    show(Progress(stage="download", detail="model", done=1, total=2, unit="bytes"))
    show.close()
    assert stream.getvalue() == ""


def test_waiting_for_another_engine_is_printed_without_a_terminal() -> None:
    stream = io.StringIO()
    TerminalProgress(stream)(Progress(stage=WAIT, detail="for another kvscope engine (pid 7)"))
    assert stream.getvalue() == "kvscope-engine: waiting for another kvscope engine (pid 7)\n"
