"""Importing transformers without the parts that kvscope does not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from kvscope_engine.cli.quick_transformers import TESTED_VERSION

SCRIPT = """
import json, sys
from kvscope_engine.cli.lazy_engine import engine_class
engine = engine_class()
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
with engine(EngineConfig(model=sys.argv[1], device="cpu", dtype="float32", num_gpu_blocks_override=8)) as running:
    running.submit(Submit(request_id="1", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2)))
    while running.has_unfinished:
        running.step()
names = ("torch._dynamo.utils", "sympy.core", "torch.distributed.tensor", "transformers.generation.continuous_batching")
loaded = [name for name in names if name in sys.modules]
import torch, torch._dynamo.config, transformers, transformers.models
from transformers.utils.import_utils import create_import_structure_from_path, spread_import_structure
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
works = torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).tolist()
structure = spread_import_structure(create_import_structure_from_path(transformers.models.__file__))
import kvscope_engine.cli.quick_transformers as quick
cached = quick._import_structure(lambda path: sys.exit("not cached"), transformers.models.__file__)
print(json.dumps([loaded, works, cached == structure]))
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[..., str]) -> Callable[[], list[object]]:
    def run() -> list[object]:
        environment = {**os.environ, "KVSCOPE_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", SCRIPT, tiny_model()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        result: list[object] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run


def test_engine_runs_without_the_compiler_which_can_still_be_imported(
    run: Callable[[], list[object]], tmp_path: Path
) -> None:
    assert run() == [[], [1.0], True]
    damaged = next((tmp_path / "transformers").iterdir())
    damaged.write_bytes(b"{")
    assert run() == [[], [1.0], True]
    assert json.loads(damaged.read_bytes())["value"]


def test_installed_version_of_transformers_is_the_tested_one() -> None:
    assert version("transformers").startswith(TESTED_VERSION), "test the new version with quick_transformers"
