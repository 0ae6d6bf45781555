"""Real engines on models with sliding windows or chunks have several KV groups, free blocks and give the same
tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, SamplingParams
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.request_state import RequestState

Make = Callable[..., Engine]

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "sliding_window": 13,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FULL, WINDOW = "full_attention", "sliding_attention"
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 5, "layer_types": [WINDOW, WINDOW, FULL, WINDOW, WINDOW]},
    "gemma2": {"num_hidden_layers": 4, "query_pre_attn_scalar": 16},
    "mistral": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "sliding_window": None,
        "attention_chunk_size": 13,
        "floor_scale": 9,
        "attn_scale": 0.5,
    },
}
GROUPS = {
    "gemma3_text": (0, 13, 13, 13, 13),
    "gemma2": (0, 13),
    "mistral": (13,),
    "gpt_oss": (0, 13),
    "llama4_text": (0, 13, 13, 13),
}
SHARING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL],
    "num_kv_shared_layers": 3,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def windowed_model(tmp_path: Path) -> Callable[[str], tuple[str, Any]]:
    """Function that returns the name of a tiny model with windows, and the model in transformers:
    `windowed_model(kind)`.
    """

    def make(kind: str) -> tuple[str, Any]:
        from transformers import AutoConfig, AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        config = AutoConfig.for_model(kind, **(SIZES | (MODELS | {"gemma4_text": SHARING})[kind]))
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        folder = tmp_path / kind
        model.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | {"eos_token_id": None}))
        return str(folder), model

    return make


def prompts(seed: int) -> list[list[int]]:
    """Return prompts, some much longer than a window; half of them begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 256) for _ in range(45)]
    return [
        (shared if index % 2 else []) + [rng.randrange(3, 256) for _ in range(rng.randrange(4, 30))]
        for index in range(8)
    ]


@torch.inference_mode()
def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, use_cache=True)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def engine_tokens(
    engine: Engine, asked: list[list[int]], count: int, n: int = 1, *, swap_every: int = 0
) -> dict[int, list[int]]:
    """Return the greedy tokens of all prompts submitted at once; one request is swapped out every so many steps."""
    numbers: dict[int, int] = {}
    for place, prompt in enumerate(asked):
        sampling = SamplingParams(max_tokens=count, n=n, **GREEDY)
        accepted = engine.submit(Submit(request_id=f"r{place}", prompt_token_ids=tuple(prompt), sampling=sampling))
        numbers |= dict.fromkeys(accepted.numbers, place)
    requests = dict(engine.components.scheduler.requests)
    scheduler = engine.components.scheduler
    while engine.has_unfinished:
        engine.step()
        running = [request for request in requests.values() if request.state is RequestState.RUNNING]
        if swap_every and running and engine.step_count % swap_every == 0:
            scheduler.preempt(running[engine.step_count % len(running)], "swap", "a test", 0)
        scheduler.check_integrity()
    found: dict[int, list[int]] = {}
    for number, place in numbers.items():
        tokens = requests[number].output_token_ids
        assert found.setdefault(place, tokens) == tokens
    return found


@pytest.mark.storm({"kind": "gemma2"})  # `gemma3_text` has such layers too
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_of_sliding_window_models_do_not_depend_on_preemption_prefix_hits_or_forks(
    kind: str, make_engine: Make, windowed_model: Callable[[str], tuple[str, Any]]
) -> None:
    name, model = windowed_model(kind)
    asked = prompts(1)
    wanted = {place: reference_tokens(model, prompt, 20) for place, prompt in enumerate(asked)}
    num_groups = len(GROUPS[kind])
    engine = make_engine(model=name, num_gpu_blocks_override=30 * num_groups, max_num_batched_tokens=24)
    groups = engine.hello.cache.groups
    assert tuple(group.window for group in groups) == GROUPS[kind]
    assert {group.kind for group in groups if group.window} == {"chunked" if kind == "llama4_text" else "window"}
    assert engine_tokens(engine, asked, 20) == wanted
    assert engine_tokens(engine, asked, 20, n=2) == wanted
    counters = engine.snapshot().counters
    assert counters.preemptions > 0
    assert counters.cached_tokens > 40
    pool = engine.components.pool
    assert pool.num_active == 0
    assert pool.num_free + pool.num_cached == pool.num_usable


@pytest.mark.storm({"kind": "gemma3_text"})  # `mistral` has windows too, `llama4_text` several groups
@pytest.mark.parametrize(("kind", "num_blocks"), [("gemma3_text", 72), ("mistral", 22), ("llama4_text", 58)])
def test_window_blocks_are_offloaded_and_loaded(
    kind: str,
    num_blocks: int,
    make_engine: Make,
    windowed_model: Callable[[str], tuple[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    name, model = windowed_model(kind)
    asked = prompts(2)
    wanted = {place: reference_tokens(model, prompt, 20) for place, prompt in enumerate(asked)}
    tiers = {"host_kv_memory_bytes": 1 << 19, "disk_kv_memory_bytes": 1 << 22, "preemption": "swap"}
    engine = make_engine(model=name, num_gpu_blocks_override=num_blocks, max_num_batched_tokens=24, **tiers)
    assert engine_tokens(engine, asked, 20, swap_every=5) == wanted
    assert engine_tokens(engine, asked, 20, swap_every=3) == wanted
    counters = engine.snapshot().counters
    assert counters.swapped_blocks > 0
    assert counters.loaded_blocks > 0


@pytest.mark.parametrize(("kind", "least"), [("gemma3_text", 4), ("llama4_text", 1)])
def test_request_holds_only_the_blocks_of_its_windows(
    kind: str, least: int, make_engine: Make, windowed_model: Callable[[str], tuple[str, Any]]
) -> None:
    """A window of 13 lies in 4 or 5 blocks of 4 tokens, for every length of text; a chunk begins again."""
    name, _ = windowed_model(kind)
    engine = make_engine(model=name, num_gpu_blocks_override=400, max_num_batched_tokens=16)
    sampling = SamplingParams(max_tokens=100, **GREEDY)
    ids = tuple(range(3, 203))
    engine.submit(Submit(request_id="long", prompt_token_ids=ids, sampling=sampling))
    (request,) = engine.components.scheduler.requests.values()
    while len(request.output_token_ids) < 90:
        engine.step()
    ledger = engine.components.pool.ledger
    held = [
        int(((ledger.state == BlockState.ACTIVE) & (ledger.group == group)).sum()) for group in range(len(GROUPS[kind]))
    ]
    assert held[0] == -(-request.num_computed_tokens // 4)
    assert all(least <= count <= 5 for count in held[1:])
    assert engine.components.pool.num_active == sum(held) == len(request.held_blocks)


@pytest.mark.parametrize("kind", ["gemma3_text", "llama4_text"])
def test_other_allocators_and_sparse_decode_free_no_window_blocks(
    kind: str, make_engine: Make, windowed_model: Callable[[str], tuple[str, Any]]
) -> None:
    name, model = windowed_model(kind)
    asked = prompts(3)[:3]
    wanted = {place: reference_tokens(model, prompt, 8) for place, prompt in enumerate(asked)}
    for options in ({"allocator": "buddy"}, {"sparse_decode": 1.0}):
        engine = make_engine(model=name, **options)
        assert not engine.hello.cache.groups
        assert engine_tokens(engine, asked, 8) == wanted


def test_request_that_fits_only_because_windows_are_freed_is_accepted(
    make_engine: Make, windowed_model: Callable[[str], tuple[str, Any]]
) -> None:
    name, _ = windowed_model("mistral")
    engine = make_engine(model=name, num_gpu_blocks_override=12, max_num_batched_tokens=16)
    sampling = SamplingParams(max_tokens=50, **GREEDY)
    engine.submit(Submit(request_id="long", prompt_token_ids=tuple(range(3, 203)), sampling=sampling))
    while engine.has_unfinished:
        engine.step()
    assert engine.hello.cache.max_request_tokens == 512


def test_layers_that_share_keys_and_values_store_them_once(
    make_engine: Make, windowed_model: Callable[[str], tuple[str, Any]]
) -> None:
    """Gemma 4's last layers read the cache of the last full layer and the last window layer, whose heads differ."""
    name, model = windowed_model("gemma4_text")
    asked = prompts(4)
    wanted = {place: reference_tokens(model, prompt, 12) for place, prompt in enumerate(asked)}
    engine = make_engine(model=name, num_gpu_blocks_override=150, max_num_batched_tokens=24)
    groups = engine.hello.cache.groups
    assert [(group.kind, group.num_layers) for group in groups] == [("full", 1), ("window", 1), ("window", 1)]
    assert [group.block_bytes for group in groups] == [4 * 2 * 2 * 32 * 4, 4 * 2 * 2 * 16 * 4, 4 * 2 * 2 * 16 * 4]
    assert engine.hello.cache.block_bytes == groups[0].block_bytes, "the tensor is not as wide as its widest layer"
    assert engine_tokens(engine, asked, 12) == wanted
    assert engine_tokens(engine, asked, 12) == wanted
