"""Real engines as processes, on private sockets."""

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
    """`kvscope-engine serve` on `endpoint`."""

    endpoint: str
    process: Process | subprocess.Popen[Any]

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait()


class Talk:
    """A client that keeps the answers it got."""

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
    """A short path: ipc endpoints are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def tiny_engine(tiny_model: Callable[..., str], warm_python: WarmPython) -> Iterator[RunningEngine]:
    """One for all tests of a file: a tiny random model whose requests may be long."""
    model = tiny_model(max_position_embeddings=65536)
    options = ["--model", model, "--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", "8192"]
    with serving(warm_python, *options) as engine:
        yield engine


@contextmanager
def serving(warm_python: WarmPython, *options: str) -> Iterator[RunningEngine]:
    """An engine on an endpoint of its own; killed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    engine = RunningEngine(f"ipc://{folder}", warm_python.start(["serve", "--endpoint", f"ipc://{folder}", *options]))
    yield engine
    engine.kill()
    assert engine.process.stderr is not None
    engine.process.stderr.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_engine(socket_folder: Path, warm_python: WarmPython) -> Iterator[Callable[..., RunningEngine]]:
    """Starts engines on one endpoint, one after the other; none survives the test."""
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
def talk_to() -> Iterator[Callable[[RunningEngine], Talk]]:
    """Attaches to an engine and waits until it is live."""
    talks: list[Talk] = []

    def attach(engine: RunningEngine) -> Talk:
        talk = Talk(LiveSource(engine.endpoint))
        talks.append(talk)
        talk.wait_for(lambda: talk.source.status.state is SourceState.LIVE, START_S)
        return talk

    yield attach
    for talk in talks:
        talk.source.close()
