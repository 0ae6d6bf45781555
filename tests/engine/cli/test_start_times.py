"""`--debug` prints what the start of an engine costs."""

from __future__ import annotations

import pytest

from kvscope_engine.cli.start_times import StartTimes
from kvscope_telemetry.messages.telemetry import Progress


def test_each_stage_is_printed_once_when_the_engine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    passed_on: list[Progress] = []
    report = StartTimes(passed_on.append)
    events = [Progress(stage="import")]
    events += [Progress(stage="load", detail="weights", done=done, total=2) for done in range(3)]
    events += [Progress(stage="warm up"), Progress(stage="load", detail="weights"), Progress(stage="warm up")]
    for event in events:
        report(event)
    assert capsys.readouterr().err == ""
    report(Progress(stage="ready"))
    assert passed_on == [*events, Progress(stage="ready")]
    header, _, *rows = capsys.readouterr().err.splitlines()
    assert "processor time" in header
    assert [row.split("  ")[0] for row in rows] == [
        "Python, options",
        "import torch, transformers, kvscope; read the configuration",
        "load weights",
        "warm up",
    ]
    assert "–" in rows[0]
