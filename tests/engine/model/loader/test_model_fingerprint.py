"""Whatever changes a model's numbers changes its fingerprint, and a kept file is not reused for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.model.loader import model_fingerprint as fingerprint
from kvscope_engine.model.loader.model_fingerprint import model_fingerprint, tensor_sum
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
CONFIG_CHANGES: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "rope_scaling": {"rope_parameters": YARN},
    "rms_norm_eps": {"rms_norm_eps": 1e-3},
    "hidden_act": {"hidden_act": "gelu"},
}


def change_weight(folder: Path, change: str) -> None:
    """Change one row of the embedding, or one number of a projection."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change == "row":
        tensors["model.embed_tokens.weight"][77] += 0.5
    else:
        tensors["model.layers.1.self_attn.q_proj.weight"][5, 9] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("change", [*CONFIG_CHANGES, "row", "number"])
def test_kept_blocks_are_not_reused_after_a_change_of_the_model(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, change: str
) -> None:
    folder, path = tiny_checkpoint("llama"), tmp_path / "tier"
    options = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=60,
        host_kv_memory_bytes=8 << 11,
        disk_kv_memory_bytes=200 << 11,
        disk_kv_path=str(path),
        keep_disk_kv=True,
    )
    submit = Submit(
        request_id="-",
        prompt_token_ids=tuple(random.Random(1).choices(range(3, 256), k=70)),
        sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    )

    def cached() -> tuple[int, str]:
        with Engine(options) as engine:
            (completion,) = engine.generate([submit])
        return completion.usage.cached_tokens, " ".join(engine.notes)

    cached()
    assert cached()[0] > 0
    if change in CONFIG_CHANGES:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_bytes()) | CONFIG_CHANGES[change]))
    else:
        change_weight(folder, change)
    assert cached() == (0, f"{str(path)!r} is used anew: its index is of another model or layout")


def test_origin_of_a_model_does_not_change_its_configuration_text(tiny_checkpoint: Callable[..., Path]) -> None:
    from kvscope_engine.model.hf_config import read_config
    from kvscope_engine.model.loader.model_fingerprint import config_text

    path = tiny_checkpoint("llama") / "config.json"
    before = config_text(read_config(path))
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"transformers_version": "0", "_name_or_path": "x"}))
    assert config_text(read_config(path)) == before


def test_non_persistent_buffers_change_the_fingerprint() -> None:
    module = nn.Linear(2, 2)
    module.config = type("Config", (), {"to_dict": staticmethod(dict)})  # type: ignore[assignment]
    module.register_buffer("inv_freq", torch.ones(3), persistent=False)
    before = model_fingerprint(module)
    module.inv_freq[1] = 2.0  # type: ignore[operator, index]
    assert model_fingerprint(module) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 1001])
def test_model_fingerprint_depends_on_every_weight_and_its_position(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    monkeypatch.setattr(fingerprint, "CPU_CHUNK_WORDS", 16)
    generator = torch.Generator().manual_seed(count)
    tensor = (torch.randn(count, generator=generator) * 50).clamp(min=0).to(dtype)
    whole = tensor_sum(tensor)
    assert tensor_sum(tensor.clone()) == whole
    for place in range(0, count, 37):
        changed = tensor.clone()
        changed[place] = 0 if changed[place] else 1
        assert tensor_sum(changed) != whole
    if count > 100:
        assert len({tensor_sum(tensor.roll(shift)) for shift in range(50)}) == 50, "the same numbers at other positions"


def test_model_fingerprint_changes_if_two_weights_flip_their_signs() -> None:
    """A plain weighted sum would not notice them."""
    ones = torch.ones(2000)
    sums = set()
    for place in range(0, 1990, 2):
        flipped = ones.clone()
        flipped[place] = flipped[place + 7] = -1.0
        sums.add(tensor_sum(flipped))
    assert len(sums) == 995


def test_fingerprint_of_a_tensor_view_equals_that_of_its_copy() -> None:
    base = torch.arange(100, dtype=torch.int16)
    assert tensor_sum(base[3:50]) == tensor_sum(base[3:50].clone())
    assert tensor_sum(base.reshape(10, 10).T) == tensor_sum(base.reshape(10, 10).T.contiguous())
