"""Reading LoRA adapter folders, and one-line errors for those that are not accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lora_folder import PREFIX, write_files

from kvscope_engine.model.layers.lora.peft_folder import read_adapter
from kvscope_telemetry.errors import BadInput

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
Tensors = dict[str, torch.Tensor]


def tensors(layer: str = "model.layers.0.self_attn.q_proj", rank: int = 2) -> Tensors:
    torch.manual_seed(0)
    return {
        f"{PREFIX}{layer}.lora_A.weight": torch.randn(rank, 8),
        f"{PREFIX}{layer}.lora_B.weight": torch.randn(6, rank),
    }


def product(given: Tensors) -> torch.Tensor:
    a, b = given.values()
    return b @ a


def test_lora_scale_is_multiplied_into_the_b_matrix(tmp_path: Path) -> None:
    given = tensors()
    for rslora, scale in ((False, 2.0), (True, 4 / 2**0.5)):
        write_files(tmp_path, given, CONFIG | {"use_rslora": rslora, "some_later_field": {"a": 1}})
        found = read_adapter("sql", str(tmp_path), 16, torch.float32)
        a, b = found.deltas["model.layers.0.self_attn.q_proj"]
        torch.testing.assert_close(b @ a, scale * product(given))
        assert (found.rank, found.num_bytes) == (2, 4 * (2 * 8 + 6 * 2))


def test_rank_pattern_determines_the_scale(tmp_path: Path) -> None:
    """PEFT divides by the layer's own rank."""
    given = tensors(rank=4)
    write_files(tmp_path, given, CONFIG | {"rank_pattern": {"q_proj": 4}})
    a, b = read_adapter("sql", str(tmp_path), 16, torch.float32).deltas["model.layers.0.self_attn.q_proj"]
    torch.testing.assert_close(b @ a, product(given))


def test_adapter_key_depends_on_name_scale_and_weights(tmp_path: Path) -> None:
    def key(name: str = "sql") -> bytes:
        return read_adapter(name, str(tmp_path), 16, torch.float32).key

    write_files(tmp_path, tensors(), CONFIG)
    keys = [key(), key("python")]
    assert key() == keys[0]
    write_files(tmp_path, tensors(), CONFIG | {"lora_alpha": 8})
    keys.append(key())
    write_files(tmp_path, {name: tensor + 1 for name, tensor in tensors().items()}, CONFIG)
    keys.append(key())
    assert len(set(keys)) == 4


def without_b() -> Tensors:
    return {name: tensor for name, tensor in tensors().items() if "lora_A" in name}


def with_nan() -> Tensors:
    return {name: tensor * float("nan") for name, tensor in tensors().items()}


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], Tensors], str]] = {
    "dora": ({"use_dora": True}, tensors, "use_dora=true is not accepted"),
    "bias": ({"bias": "all"}, tensors, "bias='all' is not accepted: none"),
    "of lora_B": ({"lora_bias": True}, tensors, "lora_bias=true is not accepted"),
    "another kind": ({"peft_type": "IA3"}, tensors, "peft_type='IA3' is not accepted: LORA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, tensors, "modules_to_save is not accepted"),
    "experts": ({"target_parameters": ["mlp.experts.down_proj"]}, tensors, "target_parameters is not accepted"),
    "own alphas": ({"alpha_pattern": {"q_proj": 8}}, tensors, "alpha_pattern is not accepted"),
    "changed base": ({"init_lora_weights": "pissa_niter_16"}, tensors, "it changes the base model too"),
    "no rank": ({"r": "four"}, tensors, "adapter_config.json cannot be read: Expected `int`"),
    "a large rank": ({}, lambda: tensors(rank=17), "rank 17 is not accepted: must be at most 16 (--max-lora-rank)"),
    "half a pair": ({}, without_b, "q_proj.lora_B.weight' is missing"),
    "no numbers": ({}, with_nan, "q_proj' holds NaN or infinity"),
    "too large a scale": ({"lora_alpha": 1e308}, tensors, "q_proj' holds NaN or infinity"),
    "embeddings": (
        {},
        lambda: {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(2, 8)},
        "only lora_A and lora_B of linear layers are",
    ),
    "a vector": ({}, lambda: {name: tensor[0] for name, tensor in tensors().items()}, "a matrix of float32"),
    "of bits": ({}, lambda: {name: tensor.to(torch.int8) for name, tensor in tensors().items()}, "of int8: a matrix"),
    "other ranks": ({}, lambda: tensors() | {f"{PREFIX}x.lora_A.weight": torch.zeros(3, 8)}, "lora_B.weight' is miss"),
    "nothing": ({}, dict, "holds no layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_adapter_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    config, given, says = REFUSED[case]
    write_files(tmp_path, given(), CONFIG | config)
    with pytest.raises(BadInput) as refusal:
        read_adapter("sql", str(tmp_path), 16, torch.float32)
    words = str(refusal.value)
    assert says in words
    assert words.startswith(f"LoRA adapter 'sql' ({str(tmp_path)!r}): ")
    assert "\n" not in words


def test_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(BadInput) as refusal:
            read_adapter("sql", str(tmp_path / "sql"), 16, torch.float32)
        return str(refusal.value)

    assert "there is no such folder" in why()
    (tmp_path / "sql").mkdir()
    assert "adapter_config.json cannot be read: No such file" in why()
    (tmp_path / "sql" / "adapter_config.json").write_text("{")
    assert "adapter_config.json cannot be read" in why()
    (tmp_path / "sql" / "adapter_config.json").write_text(json.dumps(CONFIG))
    assert "adapter_model.safetensors cannot be read: No such file" in why()
    (tmp_path / "sql" / "adapter_model.bin").write_bytes(b"x")
    assert "adapter_model.bin is not read, for it may hold code" in why()
    (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    assert "adapter_model.safetensors cannot be read" in why()
