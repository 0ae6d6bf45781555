"""Fixtures of tests of whole engines, which run if `KVSCOPE_ENGINES` names an environment that has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.warm_python import WarmPython


@pytest.fixture(scope="session")
def engines() -> Path:
    """The folder of the environment."""
    where = os.environ.get("KVSCOPE_ENGINES")
    if not where:
        pytest.skip("needs an environment with vLLM or SGLang: make test-engines DIR")
    return Path(where)


@pytest.fixture(scope="session")
def engine_env() -> dict[str, str]:
    """Environment variables to run an engine on a CPU with kvscope from this checkout."""
    root = Path(__file__).parents[2]
    ours = f"{root / 'engine'}:{root / 'app'}"
    before = os.environ.get("KVSCOPE_ENGINES_PATH")  # the folder of another version
    return os.environ | {
        "PYTHONPATH": f"{before}:{ours}" if before else ours,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # sets of request ids have the same order each time
    }


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model in Hugging Face format, as kvscope's engine keeps it after its first start."""
    where = os.environ.get("KVSCOPE_ENGINES_MODEL")
    if not where:
        pytest.skip("needs a model folder: make test-engines DIR")
    return Path(where)


@pytest.fixture(scope="session")
def warm_vllm(engines: Path, engine_env: dict[str, str]) -> Iterator[WarmPython]:
    """A Python of the environment that has imported vLLM, of which each driven scheduler is a fork."""
    paths = f"{engine_env['PYTHONPATH']}:{Path(__file__).parent}"
    environment = engine_env | {"PYTHONPATH": paths, "VLLM_LOGGING_LEVEL": "ERROR"}
    warm = WarmPython("vllm_imports", "vllm_scheduler", python=engines / "bin/python", environment=environment)
    assert warm.ask(threads=True) == 1, "a fork would lack the other threads"
    yield warm
    warm.close()
