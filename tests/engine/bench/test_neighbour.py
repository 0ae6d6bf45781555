"""Neighbours are busy, of the priority asked for, and gone afterwards whatever happens; the table has its rows."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvscope_engine.bench import decode_child, neighbour
from kvscope_engine.bench.neighbour import Measured, busy_processes
from kvscope_engine.cli.main import main
from kvscope_telemetry.errors import KvscopeError

OWNER = """
import sys, time
from kvscope_engine.bench.neighbour import busy_processes
with busy_processes(2, 19) as pids:
    print(*pids, flush=True)
    sys.stdin.read()
"""


def test_neighbours_have_their_priority_and_end_with_the_context() -> None:
    with busy_processes(2, 19) as lowest, busy_processes(1, 0, own_session=True) as normal:
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in lowest] == [min(19, mine + 19)] * 2
        assert os.getpriority(os.PRIO_PROCESS, normal[0]) == mine
        assert os.getsid(lowest[0]) == os.getsid(0)
        assert os.getsid(normal[0]) == normal[0]
    for pid in (*lowest, *normal):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_neighbours_end_with_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="the bench failed"), busy_processes(1, 19) as pids:
        raise RuntimeError("the bench failed")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_neighbours_end_with_a_bench_that_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    descriptors = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(descriptors) == 2
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 60.0)[0], "a neighbour outlives its bench"
        os.close(descriptor)


def test_ratios_are_within_a_round() -> None:
    quiet = [Measured(10.0, 2), Measured(20.0, 2), Measured(40.0, 2)]
    beside = [Measured(9.0, 2), Measured(10.0, 1), Measured(10.0, 1)]
    summary = neighbour._summary(beside, quiet)
    assert summary == {"tokens_per_second": 10.0, "of_quiet": 0.5, "num_threads": 1}


@pytest.mark.parametrize("autogroup", ["1", "0"])
def test_the_third_case_is_there_where_the_kernel_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, autogroup: str
) -> None:
    switch = tmp_path / "autogroup"
    switch.write_text(f"{autogroup}\n")
    monkeypatch.setattr(neighbour, "AUTOGROUP", switch)
    monkeypatch.setattr(neighbour, "contender_in", _pretended)
    words = ["bench", "neighbour", "--repeats", "2", "--seconds", "0.01", "--threads", "1"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["situations"]) == [
        "quiet",
        "lowest priority",
        "normal priority",
        *(["lowest, another session"] if autogroup == "1" else []),
    ]
    names = ["kvscope", "kvscope, always 2 threads", "kvscope, always 1 thread", "transformers"]
    assert [list(rows) for rows in report["situations"].values()] == [names] * len(report["situations"])
    assert report["quiet_over_fixed_threads"] == 1.0
    assert main(words) == 0
    assert "normal priority" in capsys.readouterr().out


@contextmanager
def _pretended(args: argparse.Namespace, name: str, num_threads: int | None) -> Iterator[tuple[object, int]]:
    yield lambda seconds: {"tokens": 10, "seconds": 2.0, "threads": num_threads or 2}, 2


def test_numbers_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "neighbour", "--repeats", "0"]) == 2
    assert "each must be above 0" in capsys.readouterr().err


def test_a_contender_measures_what_it_is_told(
    tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("0.01\n0.02\n"))
    options = ["--model", tiny_model(), "--dtype", "float32", "--requests", "2", "--threads", "1"]
    assert decode_child.main(["kvscope", *options]) == 0
    ready, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready == {"threads": 1}
    assert len(answers) == 2
    assert all(answer["tokens"] >= 2 and answer["seconds"] > 0 for answer in answers)


def test_a_contender_that_ends_is_said() -> None:
    args = argparse.Namespace(requests=1, dtype="none that exists", model="default")
    with (
        pytest.raises(KvscopeError, match="kvscope ended before it was measured"),
        neighbour.contender_in(args, "kvscope", None),
    ):
        pass
