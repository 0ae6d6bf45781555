"""`python -m benchmarks.gpu_session`: its commands exist, and a failed part does not stop the others."""

import sys
from typing import Any

import pytest

from benchmarks import gpu_session
from benchmarks.command_line import run_benchmark
from kvscope_engine.bench import gpu
from kvscope_engine.bench.on_gpu.setting import engine_options
from kvscope_engine.command_parser import CommandParser


def test_session_measures_with_existing_options_of_the_gpu_benchmark() -> None:
    for part in gpu_session.PARTS:
        for options in filter(None, (part.options, part.rehearsal)):
            parser = CommandParser()
            gpu.add_arguments(parser)
            for others in parser.parse_args(options.split()).others or ():
                engine_options(others)


def test_session_continues_after_a_failed_part_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = {"8b": "import sys; sys.exit(3)", "135m": "print('measured')"}
    monkeypatch.setattr(
        gpu_session.SessionPart, "command", lambda part, is_rehearsal: [sys.executable, "-c", programs[part.name]]
    )
    assert _run_session("8b", "135m") == 1
    printed = capfd.readouterr().out
    assert "-- 8b: FAILED: exit status 3" in printed
    assert "measured" in printed
    assert "-- 135m: passed" in printed


def test_session_skips_parts_without_time_and_refuses_unknown_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert _run_session("8b", "--seconds", "1") == 0
    assert "-- 8b: skipped: the session's time is over" in capfd.readouterr().out
    assert _run_session("9b") != 0
    assert "there is no part 9b" in capfd.readouterr().err


def _run_session(*arguments: str) -> Any:
    return run_benchmark(gpu_session.__doc__, gpu_session.add_arguments, gpu_session.run, arguments)
