"""Real engines with quantized caches: the same tokens however a request is run, and what is reported of the blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

Make = Callable[..., Engine]
FORMATS = ["int8", "fp8"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of 3 to 90 tokens; half of them begin alike."""
    draw = random.Random(3)
    shared = draw.choices(range(3, 256), k=41)
    tails = [draw.choices(range(3, 256), k=length) for length in (3, 17, 40, 5, 49, 30, 8, 12)]
    return [tuple(shared + tail if index % 2 else tail) for index, tail in enumerate(tails)]


def engine_tokens(engine: Engine, asked: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    submits = [Submit(request_id=str(i), prompt_token_ids=tuple(ids), sampling=GREEDY) for i, ids in enumerate(asked)]
    return [tuple(completion.token_ids) for completion in engine.generate(submits)]


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_tokens_with_a_quantized_cache_do_not_depend_on_batch_preemption_or_prefix_hits(
    make_engine: Make, kv_cache_dtype: str
) -> None:
    frames: list[TelemetryMessage] = []
    plain = make_engine(kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
    alone = [answer for ids in prompts() for answer in engine_tokens(plain, [ids])]
    assert engine_tokens(plain, prompts()) == alone

    small = {"num_gpu_blocks_override": 50, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    busy = make_engine(kv_cache_dtype=kv_cache_dtype, publish=frames.append, **small)
    assert engine_tokens(busy, prompts()) == alone
    assert engine_tokens(busy, prompts()) == alone, "what the first round left in the prefix cache"
    counters = [message for message in frames if isinstance(message, Frame)][-1].counters
    assert counters.preemptions > 0, "no request was preempted: the test checks too little"
    assert counters.cached_tokens > 0


def test_quantized_keys_are_used_for_attention(make_engine: Make) -> None:
    """Outputs begin as without quantization, and all three formats give different outputs."""
    asked = [tuple(random.Random(seed).choices(range(3, 256), k=60)) for seed in range(10)]
    found = {name: engine_tokens(make_engine(kv_cache_dtype=name), asked) for name in ("auto", *FORMATS)}
    for name in FORMATS:
        first = [one[0] == other[0] for one, other in zip(found["auto"], found[name], strict=True)]
        assert sum(first) >= {"int8": 8, "fp8": 5}[name], name
        assert found[name] != found["auto"], name
    assert found["int8"] != found["fp8"]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "said"),
    [("auto", "float32"), ("int8", "int8"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn")],
)
def test_hello_reports_the_cache_dtype_and_block_size(make_engine: Make, kv_cache_dtype: str, said: str) -> None:
    engine = make_engine(kv_cache_dtype=kv_cache_dtype)
    vector_bytes = 16 * 4 if kv_cache_dtype == "auto" else 16 + 4
    assert engine.hello.cache.dtype == said
    assert engine.hello.cache.block_bytes == 2 * 2 * 4 * 2 * vector_bytes, (
        "not the product of layers, K and V, slots and heads"
    )
    assert engine.memory().kv_bytes == 256 * engine.hello.cache.block_bytes


@pytest.mark.parametrize("bad", ["int4", "fp8_e5m2", ""])
def test_unknown_cache_dtype_is_refused_with_the_known_ones(bad: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": bad}
    with pytest.raises(
        BadInput, match=rf"^kv_cache_dtype='{bad}' is not accepted: must be one of auto, fp8, fp8_e4m3, int8$"
    ):
        EngineConfig(**options)
