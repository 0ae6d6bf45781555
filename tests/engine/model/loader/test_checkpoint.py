"""Folders with safetensors load like in transformers if complete; others are refused by name."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvscope_engine.model.hf_config import read_config
from kvscope_engine.model.loader.checkpoint import INDEX_FILE, WEIGHTS_FILE, check_weights, load_weights
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import Progress

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])


@pytest.fixture
def llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama")


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model as loaded by us."""
    return load_weights(folder, read_config(folder / "config.json"), dtype, CPU, "x", lambda _: None)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_loaded_model_equals_transformers(
    tiny_checkpoint: Callable[..., Path], kind: str, same: Callable[..., bool]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(kind)
    check_weights(folder)
    auto: Any = AutoModelForCausalLM
    expected = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    assert same(loaded(folder).eval(), expected, IDS)


def test_model_is_loaded_in_another_dtype(llama: Path) -> None:
    model = loaded(llama, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_loading_reports_progress_and_prints_nothing(
    llama: Path, progress_events: list[Progress], capfd: pytest.CaptureFixture[str]
) -> None:
    load_weights(llama, read_config(llama / "config.json"), torch.float32, CPU, "tiny", progress_events.append)
    assert {(progress.stage, progress.detail, progress.unit) for progress in progress_events} == {
        ("load", "tiny", "tensors")
    }
    assert (progress_events[0].done, progress_events[-1].done) == (0, progress_events[-1].total)
    assert progress_events[-1].total > 10
    assert capfd.readouterr() == ("", "")


def test_shards_are_loaded_and_a_missing_one_is_refused(llama: Path, same: Callable[..., bool]) -> None:
    expected = loaded(llama)
    expected.save_pretrained(llama, max_shard_size="50KB")
    (llama / WEIGHTS_FILE).unlink()
    assert (llama / INDEX_FILE).is_file()
    check_weights(llama)
    assert same(loaded(llama), expected, IDS)
    next(llama.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(BadInput, match=r"model-00002.* is missing"):
        check_weights(llama)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "../x.safetensors"}}]
)
def test_invalid_index_is_refused(llama: Path, index: dict[str, Any]) -> None:
    (llama / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(BadInput, match=INDEX_FILE):
        check_weights(llama)


def test_folder_without_safetensors_is_refused(llama: Path) -> None:
    (llama / WEIGHTS_FILE).unlink()
    with pytest.raises(BadInput, match="has no weights"):
        check_weights(llama)
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin is not read"):
        check_weights(llama)


def test_file_truncated_anywhere_is_refused(llama: Path) -> None:
    weights = llama / WEIGHTS_FILE
    size = weights.stat().st_size
    for cut in [*sorted(random.Random(0).sample(range(9, size), 20), reverse=True), 8, 7, 1, 0]:
        os.truncate(weights, cut)
        with pytest.raises(BadInput, match="damaged or cut short"):
            check_weights(llama)


def test_changed_header_is_refused_or_stays_within_the_file(llama: Path) -> None:
    weights = llama / WEIGHTS_FILE
    content = weights.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    rng = random.Random(0)
    num_refused = 0
    for _ in range(60):
        changed = bytearray(content)
        changed[rng.randrange(header)] ^= 1 << rng.randrange(8)
        weights.write_bytes(changed)
        try:
            check_weights(llama)
            loaded(llama)
        except BadInput as error:
            num_refused += "\n" not in str(error)
    assert num_refused > 40


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_do_not_match_the_configuration_are_refused(llama: Path, change: str) -> None:
    tensors = load_file(llama / WEIGHTS_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:5].clone()
    save_file(tensors, llama / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=name.replace(".", r"\.")) as refused:
        loaded(llama)
    assert ("lacks 1" if change == "missing" else "wrong shape") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        SafetensorError("Error while deserializing: I/O error: Cannot allocate memory (os error 12)"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_is_not_reported_as_a_damaged_file(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    import safetensors
    from transformers import PreTrainedModel

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    with pytest.raises(MemoryError):
        loaded(llama)
    monkeypatch.setattr(safetensors, "safe_open", fail)
    with pytest.raises(KvscopeError, match=r"no memory to read .*model\.safetensors") as refused:
        check_weights(llama)
    assert not isinstance(refused.value, BadInput)
