"""SIGTERM while an engine downloads, compiles or starts its ranks ends it with all processes that it started."""

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
"""Seconds that the child of a fake program sleeps, by which it is recognized."""


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that replaces a program with one that starts another and waits for it: `fake_program(name)`."""
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
def start_until(start_engine: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Function that starts an engine and waits for a descendant with `words` in its command line: `start_until(words,
    *options)`. What is left at the end is killed.
    """
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


def terminate(engine: Any) -> int:
    engine.process.send_signal(signal.SIGTERM)
    code: int = engine.process.wait(WAIT_S)
    return code


@pytest.mark.storm({"name": "pip"})
@pytest.mark.parametrize("name", ["pip", "cc"])
def test_sigterm_while_downloading_or_compiling_leaves_no_process(
    name: str, fake_program: Callable[[str], None], start_until: Callable[..., Any], tiny_model: Callable[..., str]
) -> None:
    fake_program(name)
    engine, children, _ = start_until(
        CHILD, *(() if name == "pip" else ("--model", tiny_model())), "--stop-timeout", "60"
    )
    assert terminate(engine) == 0
    assert engine.process.stderr.read() == "kvscope-engine: stopped before the model was loaded\n"
    wait_until_gone(children)


def test_sigterm_during_a_hub_download_leaves_no_process_or_file(
    start_engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub stops in the middle of a file, and the rest is not waited for."""
    with small_hub(tmp_path / "home") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        path = tmp_path / "run.mcap"
        engine = start_engine("--model", "owner/endless", "--stop-timeout", "60", "--record", str(path))
        num_files = 2  # config.json and model.safetensors, on threads of the hub's library
        wait_for(lambda: len(list(tmp_path.rglob("*.incomplete"))) == num_files, engine)
        children = descendants(engine)
        assert terminate(engine) == 0
        nothing = f"and nothing is recorded: there is no '{path}'"
        assert engine.process.stderr.read() == f"kvscope-engine: stopped before the model was loaded, {nothing}\n"
        wait_until_gone(children)
        assert not any(tmp_path.rglob("*.incomplete")), "an incomplete download was left"


@pytest.mark.storm({"wait_s": 0})
@pytest.mark.parametrize("wait_s", [0, 1])
def test_sigterm_while_ranks_start_leaves_no_process(
    wait_s: float, start_until: Callable[..., Any], tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    options = ("--model", tiny_model(), "--dtype", "float32", "--tensor-parallel-size", "2", "--stop-timeout", "60")
    engine, children, _ = start_until("executor.follower", *options)
    time.sleep(wait_s)
    assert terminate(engine) == 0
    wait_until_gone(children)


def test_suspended_rank_is_killed_at_the_end_and_the_recording_is_kept(
    start_until: Callable[..., Any], connect_client: Callable[..., Any], tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    """A suspended rank receives nothing and does not end by itself, so it is killed with the engine."""
    path = tmp_path / "run.mcap"
    options = ("--model", tiny_model(), "--dtype", "float32", "--tensor-parallel-size", "2", "--stop-timeout", "2")
    engine, children, follower = start_until(
        "executor.follower", *options, "--num-gpu-blocks-override", "64", "--record", str(path)
    )
    talk = connect_client(engine)
    talk.submit_ids("said", (5, 6, 7), max_tokens=3)
    talk.wait_for(lambda: "said" in talk.finished())
    follower.suspend()
    assert terminate(engine) == 1
    assert "it did not stop within 1.6 s" in engine.process.stderr.read()
    wait_until_gone(children)
    assert path.is_file()
