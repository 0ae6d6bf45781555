"""Model configurations of all kinds: what is read from them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.model.hf_config import (
    eos_token_ids,
    head_dim,
    num_kv_heads,
    num_query_heads,
    position_limit,
    read_config,
)
from kvscope_telemetry.errors import BadInput

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
}


def written(tmp_path: Path, **changes: Any) -> Path:
    """Write a Llama's `config.json` with `changes` and return its path."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    return path


def test_llama_configuration_is_read(tmp_path: Path) -> None:
    config = read_config(written(tmp_path))
    assert (num_kv_heads(config), head_dim(config), position_limit(config)) == (4, 16, 128)


def test_explicit_kv_heads_and_head_dim_are_read(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, num_key_value_heads=2, head_dim=32))
    assert (num_kv_heads(config), head_dim(config)) == (2, 32)


def test_layers_with_different_heads_are_read(tmp_path: Path) -> None:
    heads = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 16, "global_head_dim": 48}
    config = read_config(written(tmp_path, model_type="gemma4_text", num_hidden_layers=6, **heads))
    assert (num_query_heads(config), num_kv_heads(config), head_dim(config)) == (4, 4, 48)


def test_special_floats_of_transformers_are_read(tmp_path: Path) -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    config: Any = read_config(written(tmp_path, model_type="granitemoehybrid", time_step_limit=limit))
    assert tuple(config.time_step_limit) == (0.0, float("inf"))
    with pytest.raises(BadInput, match="not accepted"):
        read_config(written(tmp_path, rms_norm_eps={"__float__": "1e-5"}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "nonesuch"}, "'nonesuch' is unknown to transformers"),
        ({"model_type": None}, "no model_type"),
        ({"model_type": ["llama"]}, "no model_type"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"hidden_act": 7}, "not accepted by architecture 'llama'"),
    ],
)
def test_invalid_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(BadInput, match=reason) as refused:
        read_config(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    auto_map = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.C"}
    read_config(written(tmp_path, auto_map=auto_map))
    with pytest.raises(BadInput, match="unknown"):
        read_config(written(tmp_path, auto_map=auto_map, model_type="x"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("generation", "ids"),
    [
        (None, {7}),
        ({}, {7}),
        ({"eos_token_id": 9}, {9}),
        ({"eos_token_id": [8, 9]}, {8, 9}),
        ({"eos_token_id": -1}, set()),
    ],
)
def test_end_of_sequence_ids_are_read(tmp_path: Path, generation: dict[str, Any] | None, ids: set[int]) -> None:
    config = read_config(written(tmp_path))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path, config) == ids


@pytest.mark.parametrize("value", ["2", [2, "3"], True])
def test_end_of_sequence_id_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    config = read_config(written(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(BadInput, match="eos_token_id="):
        eos_token_ids(tmp_path, config)


def test_model_configuration_without_an_end_of_sequence_id_gives_an_empty_set(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, read_config(written(tmp_path, eos_token_id=None))) == frozenset()
