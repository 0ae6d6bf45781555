"""Fixtures of tests with real clients, which run if `KVSCOPE_CLIENTS` is the Python of an environment that has them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.http.served import wait_for

from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF_SHA256
from kvscope_engine.model.loader.gguf.gguf_entries import entry_of

ANSWER_S = 900
Run = Callable[..., str]


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """Python of the environment with the clients."""
    where = os.environ.get("KVSCOPE_CLIENTS")
    if not where:
        pytest.skip("needs an environment with clients of the OpenAI API: make test-clients")
    return Path(where)


@pytest.fixture(scope="session")
def base_url(clients_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the API of a new engine with the default model in float32."""
    folder = tmp_path_factory.mktemp("served")
    log = folder / "log"
    command = [Path(sys.executable).parent / "kvscope-engine", "serve", "--device", "cpu", "--dtype", "float32"]
    command += ["--http", "127.0.0.1:0", "--max-model-len", "2048", "--endpoint", f"ipc://{folder}/engine"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        wait_for(lambda: process.poll() is not None or "http://" in log.read_text(), "an API that listens")
        assert process.poll() is None, log.read_text()
        root = "http://" + log.read_text().partition("http://")[2].partition("/")[0]
        wait_for(lambda: process.poll() is not None or is_healthy(root), "an engine that is ready")
        yield f"{root}/v1"
        process.terminate()


def is_healthy(root: str) -> bool:
    try:
        with urllib.request.urlopen(f"{root}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The default model in Hugging Face's format, as the engine converts it, in float32."""
    return entry_of(DEFAULT_GGUF_SHA256, "float32")


@pytest.fixture
def run(clients_python: Path, base_url: str, tmp_path: Path) -> Run:
    """Run a module or script of the clients' environment and return what it prints."""

    def run(*arguments: str | Path, **environment: str) -> str:
        env = os.environ | {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": base_url, "HF_HUB_OFFLINE": "1"} | environment
        env |= {"HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        done = subprocess.run(
            [clients_python, *arguments], env=env, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
