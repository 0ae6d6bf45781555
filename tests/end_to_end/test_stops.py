"""SIGTERM while an engine fetches, compiles or starts its ranks: it ends, and nothing that it started is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engine.model.loader.download.small_hub import small_hub

WAIT_S = 240.0
CHILD = "987.25"
"""Seconds that the child of a stand-in sleeps: it is known by them."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Programs that an engine starts are ones that start another and wait for it."""
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(name: str) -> None:
        if name == "pip":
            package = tmp_path / "packages" / "pip"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(f"import subprocess\nsubprocess.run(['sleep', '{CHILD}'])\n")
            monkeypatch.setenv("PYTHONPATH", str(package.parent))
        else:
            programs = tmp_path / "programs"
            programs.mkdir()
            for compiler in ("cc", "gcc", "clang"):
                (programs / compiler).write_text(f"#!/bin/sh\nsleep {CHILD} &\nwait\n")
                (programs / compiler).chmod(0o755)
            monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.fixture
def started(start_engine: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Starts an engine and waits until one of its descendants has a command line with `words`; what is left at the end
    is killed."""
    seen: list[psutil.Process] = []

    def start(words: str, *options: str) -> tuple[Any, list[psutil.Process], psutil.Process]:
        engine = start_engine(*options)
        wait_for(lambda: any(words in command_line(each) for each in descendants(engine)), engine)
        seen.extend(descendants(engine))
        return engine, seen, next(each for each in seen if words in command_line(each))

    yield start
    for process in seen:
        if is_alive(process):
            process.kill()


def wait_for(found: Callable[[], bool], engine: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not found():
        assert engine.process.poll() is None, engine.process.stderr.read()
        assert time.monotonic() < deadline_s, "it never came so far"
        time.sleep(0.02)


def descendants(engine: Any) -> list[psutil.Process]:
    try:
        return psutil.Process(engine.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while left := [command_line(each) for each in processes if is_alive(each)]:
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.02)


def asked_to_end(engine: Any) -> int:
    engine.process.send_signal(signal.SIGTERM)
    code: int = engine.process.wait(WAIT_S)
    return code


@pytest.mark.parametrize("name", ["pip", "cc"])
def test_while_it_fetches_or_compiles(
    name: str, stand_in: Callable[[str], None], started: Callable[..., Any], tiny_model: Callable[..., str]
) -> None:
    stand_in(name)
    engine, children, _ = started(CHILD, *(() if name == "pip" else ("--model", tiny_model())), "--stop-timeout", "60")
    assert asked_to_end(engine) == 0
    assert engine.process.stderr.read() == "kvscope-engine: stopped before the model was loaded\n"
    wait_until_gone(children)


def test_while_a_model_comes_from_the_hub(
    start_engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub stands still in the middle of a file: nobody waits for the rest."""
    with small_hub(tmp_path / "home") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        path = tmp_path / "run.mcap"
        engine = start_engine("--model", "owner/endless", "--stop-timeout", "60", "--record", str(path))
        wait_for(lambda: any(tmp_path.rglob("*.incomplete")), engine)
        children = descendants(engine)
        assert asked_to_end(engine) == 0
        nothing = f"and nothing is recorded: there is no '{path}'"
        assert engine.process.stderr.read() == f"kvscope-engine: stopped before the model was loaded, {nothing}\n"
        wait_until_gone(children)
        assert not any(tmp_path.rglob("*.incomplete")), "nobody could go on with it"


@pytest.mark.parametrize("wait_s", [0, 1])
def test_while_ranks_start(
    wait_s: float, started: Callable[..., Any], tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    options = ("--model", tiny_model(), "--dtype", "float32", "--tensor-parallel-size", "2", "--stop-timeout", "60")
    engine, children, _ = started("executor.follower", *options)
    time.sleep(wait_s)
    assert asked_to_end(engine) == 0
    wait_until_gone(children)


def test_a_rank_that_stands_still_is_not_left_behind(
    started: Callable[..., Any], talk_to: Callable[..., Any], tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    """It hears nothing and ends nothing: it is killed with the engine, and what was recorded is kept."""
    path = tmp_path / "run.mcap"
    options = ("--model", tiny_model(), "--dtype", "float32", "--tensor-parallel-size", "2", "--stop-timeout", "2")
    engine, children, follower = started(
        "executor.follower", *options, "--num-gpu-blocks-override", "64", "--record", str(path)
    )
    talk = talk_to(engine)
    talk.submit_ids("said", (5, 6, 7), max_tokens=3)
    talk.wait_for(lambda: "said" in talk.finished())
    follower.suspend()
    assert asked_to_end(engine) == 1
    assert "it did not stop within 1.6 s" in engine.process.stderr.read()
    wait_until_gone(children)
    assert path.is_file()
