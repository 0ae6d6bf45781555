"""Checks of a model are made once, and again when anything that they depend on has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvscope_engine.json_cache import CHECK_AGAIN
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.verification import eager_check, fuse, hook_check
from kvscope_engine.model.verification.fuse import FusedCounts
from kvscope_engine.model.verification.passed_checks import PassedChecks
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.model.verification.trial import run_trial
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], own_cache: Path) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture
def num_traces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Function that returns how many runs of the whole model were compared so far."""
    calls: list[object] = []
    trace = eager_check.paged_trace

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return trace(*args, **kwargs)  # type: ignore[arg-type]

    for module in (eager_check, fuse):
        monkeypatch.setattr(module, "paged_trace", counted)
    return lambda: len(calls)


def load(folder: Path, **options: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), device="cpu", **options), lambda _: None)  # type: ignore[arg-type]


def start(
    folder: Path, report: Callable[[str], None] = lambda line: None, **options: object
) -> tuple[FusedCounts, torch.Tensor]:
    """Load and prepare the model in `folder`. Returns what was fused, and the logits of a few tokens."""
    loaded = load(folder, **options)
    counts = make_ready_to_run(loaded.module, loaded.quantization, PassedChecks(loaded.identity, report))
    trial = run_trial(loaded.module)
    return counts, trial.calls[loaded.module].output.logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_start_runs_no_comparison_and_gives_the_same_model(
    folder: Path, num_traces: Callable[[], int], dtype: str
) -> None:
    first, logits = start(folder, dtype=dtype)
    num_before = num_traces()
    second, same_logits = start(folder, dtype=dtype)
    assert first == second
    assert num_before > num_traces() - num_before == 0
    torch.testing.assert_close(same_logits, logits)


def test_model_is_checked_again_if_its_weights_or_its_kernels_changed(
    folder: Path, num_traces: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder)
    weights, num_before = folder / "model.safetensors", num_traces()
    os.utime(weights, ns=(1, 1))
    start(folder)
    assert num_traces() == 2 * num_before
    monkeypatch.setattr("kvscope_engine.model.loader.model_identity.program_identity", lambda: ["other sources"])
    start(folder)
    assert num_traces() == 3 * num_before
    monkeypatch.setenv(CHECK_AGAIN, "1")
    start(folder)
    assert num_traces() == 4 * num_before


def test_wrong_model_is_refused_at_each_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_check, "BOUNDS", {torch.float32: -1.0})
    monkeypatch.setattr(eager_check, "LOW_BOUND", -1.0)
    for _ in range(2):
        with pytest.raises(BadInput, match="not supported"):
            start(folder)


def test_damaged_record_is_reported_in_one_line_and_the_model_is_checked_again(
    folder: Path, own_cache: Path, num_traces: Callable[[], int]
) -> None:
    start(folder)
    (record,) = (own_cache / "checks").iterdir()
    content, num_before, lines = record.read_bytes(), num_traces(), list[str]()
    record.write_bytes(content[:-9])
    start(folder, lines.append)
    assert num_traces() == 2 * num_before
    assert [str(record) in line for line in lines] == [True]
    assert record.read_bytes() == content


def test_models_with_recurrent_layers_and_random_weights_are_not_stored(
    tiny_checkpoint: Callable[..., Path], own_cache: Path, tiny_model: Callable[..., str]
) -> None:
    assert not load(Path(tiny_model())).identity
    loaded = load(tiny_checkpoint("mamba", state_size=4))
    passed = PassedChecks(loaded.identity)
    hook_check.check_hook(loaded.module, passed)
    passed.store(float32_residual=False)
    assert not (own_cache / "checks").exists()
