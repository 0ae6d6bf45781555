"""Fixtures of end-to-end tests: real engines as processes on private sockets."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.warm_python import Process, WarmPython

from kvscope_telemetry import LiveSource, SourceState
from kvscope_telemetry.messages.commands import Finished, Reply, Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams

START_S = 240.0


@dataclass
class RunningEngine:
    """A process of `kvscope-engine serve` on `endpoint`."""

    endpoint: str
    process: Process | subprocess.Popen[Any]

    def kill(self) -> None:
        """Kill the process like `kill -9`."""
        self.process.kill()
        self.process.wait()


class ClientLog:
    """A client that keeps all replies."""

    def __init__(self, source: LiveSource) -> None:
        self.source = source
        self.replies: list[Reply] = []

    def submit(self, request_id: str, prompt: str, **sampling: object) -> None:
        params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
        self.source.send(Submit(request_id=request_id, prompt=prompt, sampling=params))

    def submit_ids(self, request_id: str, ids: Sequence[int], **sampling: object) -> None:
        params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
        self.source.send(Submit(request_id=request_id, prompt_token_ids=tuple(ids), sampling=params))

    def wait_for(self, found: Callable[[], bool], timeout_s: float = 240.0) -> None:
        def look() -> bool:
            self.replies += self.source.poll_replies()
            self.source.update_mirror()
            return found()

        assert self.source.wait(look, timeout_s), f"not within {timeout_s} s; answers so far: {self.replies[-3:]}"

    def finished(self) -> dict[str, Finished]:
        return {reply.request_id: reply for reply in self.replies if isinstance(reply, Finished)}

    def token_ids(self, request_id: str) -> list[int]:
        pieces = (reply for reply in self.replies if isinstance(reply, Tokens))
        return [token for piece in pieces if piece.request_id == request_id for token in piece.token_ids]

    def text(self, request_id: str) -> str:
        pieces = (reply for reply in self.replies if isinstance(reply, Tokens))
        return "".join(piece.text for piece in pieces if piece.request_id == request_id)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a short path, because ipc endpoints have a maximum length."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def tiny_engine(tiny_model: Callable[..., str], warm_python: WarmPython) -> Iterator[RunningEngine]:
    """An engine with a tiny random model and long requests, shared by all tests of a module."""
    model = tiny_model(max_position_embeddings=65536)
    options = ["--model", model, "--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", "8192"]
    with run_engine(warm_python, *options) as engine:
        yield engine


@contextmanager
def run_engine(warm_python: WarmPython, *options: str) -> Iterator[RunningEngine]:
    """Run an engine on its own endpoint, and kill it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    engine = RunningEngine(f"ipc://{folder}", warm_python.start(["serve", "--endpoint", f"ipc://{folder}", *options]))
    yield engine
    engine.kill()
    assert engine.process.stderr is not None
    engine.process.stderr.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_engine(socket_folder: Path, warm_python: WarmPython) -> Iterator[Callable[..., RunningEngine]]:
    """Function that starts engines on one endpoint, one after the other: `start_engine(*options)`. None survives the
    test.
    """
    engines: list[RunningEngine] = []
    endpoint = f"ipc://{socket_folder}/e/telemetry"

    def start(*options: str) -> RunningEngine:
        engines.append(RunningEngine(endpoint, warm_python.start(["serve", "--endpoint", endpoint, *options])))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
        assert engine.process.stderr is not None
        engine.process.stderr.close()


@pytest.fixture
def connect_client() -> Iterator[Callable[[RunningEngine], ClientLog]]:
    """Function that connects to an engine and waits until it is live: `connect_client(engine)`."""
    talks: list[ClientLog] = []

    def attach(engine: RunningEngine) -> ClientLog:
        talk = ClientLog(LiveSource(engine.endpoint))
        talks.append(talk)
        talk.wait_for(lambda: talk.source.status.state is SourceState.LIVE, START_S)
        return talk

    yield attach
    for talk in talks:
        talk.source.close()
