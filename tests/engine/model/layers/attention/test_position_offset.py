"""RoBERTa's positions start after the padding index, in a table that is larger by as much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.engine.model_types import tiny_config

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_telemetry.messages.commands import Submit

PADDING, ROWS = 3, 112


def write_config(folder: Path) -> Path:
    config: Any = tiny_config("roberta")
    path = folder / "config.json"
    changes = {"pad_token_id": PADDING, "max_position_embeddings": ROWS, "architectures": None}
    path.write_text(json.dumps(config.to_dict() | changes, default=str))
    return path


def test_roberta_generates_up_to_the_last_position(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": f"dummy:{write_config(tmp_path)}", "device": "cpu", "dtype": "float32"}
    loaded = load_model(EngineConfig(**options), lambda _: None)
    assert loaded.max_model_len == ROWS - PADDING - 1
    prompt = list(range(5, 105))
    ids = list(prompt)
    with torch.inference_mode():
        loaded.module.set_attn_implementation("eager")  # type: ignore[operator]
        while len(ids) < loaded.max_model_len:
            ids.append(int(loaded.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    sampling = SamplingParams(temperature=0.0, max_tokens=len(ids) - len(prompt), ignore_eos=True)
    with Engine(EngineConfig(**options, num_gpu_blocks_override=40, max_num_batched_tokens=24)) as engine:
        submit = Submit(request_id="0", prompt_token_ids=tuple(prompt), sampling=sampling)
        (completion,) = engine.generate([submit])
    assert [*prompt, *completion.token_ids] == ids
