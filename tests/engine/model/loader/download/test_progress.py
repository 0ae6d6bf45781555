"""Progress is told at a bounded rate, whole at the end, and drawn only on a terminal."""

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
    """The time in seconds; tests move it."""
    now = [100.0]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    monkeypatch.setattr(progress_module, "time", Time)
    return now


def test_start_and_end_are_told(clock: list[float], heard: list[Progress]) -> None:
    with Meter(heard.append, "load", "x", 100, "tensors") as meter:
        for _ in range(100):
            meter.advance()
    assert [progress.done for progress in heard] == [0, 100]
    assert heard[-1] == Progress(stage="load", detail="x", done=100, total=100, unit="tensors")


def test_at_most_twenty_a_second(clock: list[float], heard: list[Progress]) -> None:
    with Meter(heard.append, "load", total=1000) as meter:
        for _ in range(1000):
            clock[0] += 0.001
            meter.advance()
    assert 18 <= len(heard) <= 22


def test_nothing_new_is_not_told(clock: list[float], heard: list[Progress]) -> None:
    with Meter(heard.append, "download", total=9) as meter:
        for _ in range(10):
            clock[0] += 1
            meter.reach(3, 9)
    assert [progress.done for progress in heard] == [0, 3, 9]


def test_a_failure_is_not_called_done(heard: list[Progress]) -> None:
    with pytest.raises(ZeroDivisionError), Meter(heard.append, "load", total=10):
        _ = 1 / 0
    assert [progress.done for progress in heard] == [0]


def test_a_terminal_sees_a_bar() -> None:
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


def test_a_terminal_is_told_of_work_whose_size_nobody_knows() -> None:
    terminal = Terminal()
    show = TerminalProgress(terminal)
    for stage, detail in (("import", ""), ("compile", ""), ("warm up", ""), ("warm up", "products"), ("ready", "")):
        show(Progress(stage=stage, detail=detail))
    first, second, third = terminal.getvalue().splitlines()
    assert first.startswith("kvscope-engine: starting")
    assert second == "kvscope-engine: compiling for this processor, once"
    assert third == "kvscope-engine: making the model ready"


def test_anything_else_sees_nothing() -> None:
    stream = io.StringIO()
    show = TerminalProgress(stream)
    show(Progress(stage="download", detail="model", done=1, total=2, unit="bytes"))
    show.close()
    assert stream.getvalue() == ""


def test_whom_the_engine_waits_for_is_told_without_a_terminal_too() -> None:
    stream = io.StringIO()
    TerminalProgress(stream)(Progress(stage=WAIT, detail="for another kvscope engine (pid 7)"))
    assert stream.getvalue() == "kvscope-engine: waiting for another kvscope engine (pid 7)\n"
