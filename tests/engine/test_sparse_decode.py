"""Engines that decode with a part of their blocks: equal tokens at fraction 1, correct key bounds, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.layers.attention.sparse import page_choice
from kvscope_engine.model.layers.attention.sparse.page_choice import PageChoice
from kvscope_kernels.kv_formats import dequantize
from kvscope_telemetry.engine_config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import skipped_share
from kvscope_telemetry.messages.commands import Submit, Tokens

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def deep_model(tiny_model: Callable[..., str]) -> str:
    """A model with two layers of full attention and two that choose blocks."""
    return tiny_model(num_hidden_layers=4)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the minimum so that short requests choose blocks: at least three blocks of 4."""
    monkeypatch.setattr(page_choice, "MIN_TOKENS", 4)


def submit(engine: Engine, ids: range | tuple[int, ...], max_tokens: int, **sampling: Any) -> None:
    options = {"temperature": 0.0, "ignore_eos": True, **sampling}
    name = str(len(engine.streams))
    while any(request.request_id == name for request in engine.components.scheduler.requests.values()):
        name += "'"
    sampling_params = SamplingParams(max_tokens=max_tokens, **options)
    engine.submit(Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling_params))


def run(engine: Engine, check: Callable[[Engine], None] = lambda engine: None) -> dict[tuple[str, int], list[int]]:
    """Run all requests to their end, and return tokens by request and completion."""
    said: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished:
        for message in engine.step():
            if isinstance(message, Tokens):
                said.setdefault((message.request_id, message.index), []).extend(message.token_ids)
        check(engine)
    return said


def check_bounds(engine: Engine) -> None:
    """Check the bounds of every used block in every layer that has bounds."""
    storage, pool = engine.components.storage, engine.components.pool
    filled = pool.ledger.filled[: storage.num_blocks]
    held = {block: int(filled[block]) for block in filled.nonzero()[0].tolist()}
    for layer in range(len(storage.layers)):
        kv = storage.layer(layer)
        assert (kv.bounds is not None) == (layer >= 2)
        for block, count in held.items() if kv.bounds is not None else ():
            keys = kv.k[block, :count]
            if kv.k_scale is not None:
                keys = dequantize(keys, kv.k_scale[block, :count], storage.layers[layer].bounds_dtype)
            assert torch.equal(kv.bounds[block], torch.stack((keys.amin(0), keys.amax(0)))), (layer, block, count)


def logprobs_of(engine: Engine, num_prompts: int, max_tokens: int) -> list[list[tuple[int, float]]]:
    """Return each greedy token with its log probability, by prompt."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)
    prompts: list[str | Submit] = [
        Submit(request_id="-", prompt_token_ids=tuple(range(first, first + 150)), sampling=sampling)
        for first in range(3, 3 + 40 * num_prompts, 40)
    ]
    return [[(each.token_id, each.logprob) for each in done.logprobs] for done in engine.generate(prompts)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_fraction_one_equals_full_attention(make_engine: Make, deep_model: str, kv_cache_dtype: str) -> None:
    options = {"model": deep_model, "kv_cache_dtype": kv_cache_dtype}
    plain, whole = (make_engine(**options, sparse_decode=fraction) for fraction in (None, 1.0))
    answers = logprobs_of(plain, 2, 12)
    assert [len(answer) for answer in answers] == [12, 12]
    assert logprobs_of(whole, 2, 12) == answers


def test_small_fraction_changes_decodes_but_not_prompts(make_engine: Make, deep_model: str) -> None:
    plain, sparse = (make_engine(model=deep_model, sparse_decode=fraction) for fraction in (None, 0.1))
    (full,), (part,) = logprobs_of(plain, 1, 4), logprobs_of(sparse, 1, 4)
    assert full[0] == part[0]
    assert full[1][1] != part[1][1]


STORIES: dict[str, dict[str, Any]] = {
    "forks, prefix hits": {},
    "preempted, computed again": {"num_gpu_blocks_override": 26, "preemption": "recompute"},
    "preempted, swapped": {"num_gpu_blocks_override": 26, "preemption": "swap", "host_kv_memory_bytes": 1 << 20},
    "prefixes that sink and rise": {"num_gpu_blocks_override": 26, "host_kv_memory_bytes": 1 << 20},
    "addresses without memory": {"allocator": "virtual", "max_model_len": 128, "max_num_seqs": 4},
    "one step ahead": {"async_scheduling": True},
    "8 bits, forks, swapped": {"kv_cache_dtype": "fp8", "num_gpu_blocks_override": 26, "host_kv_memory_bytes": 1 << 20},
}


@pytest.mark.storm({"story": "preempted, computed again"}, {"story": "prefixes that sink and rise"})
@pytest.mark.parametrize("story", STORIES)
def test_key_bounds_of_sparse_decode_equal_the_keys_however_blocks_are_moved(
    make_engine: Make, deep_model: str, story: str
) -> None:
    options = STORIES[story]
    engine = make_engine(model=deep_model, sparse_decode=0.3, **options)
    is_ahead = "async_scheduling" in options  # blocks may be one step ahead of the requests' counts
    for turn in range(3):
        submit(engine, tuple(range(3, 25)), 14, n=2, temperature=0.8, seed=turn)
        submit(engine, tuple(range(3, 30 + turn)), 12)
        submit(engine, tuple(range(40 + turn, 80)), 20)
        for _ in range(4):
            engine.step()
            if not is_ahead:
                check_bounds(engine)
    run(engine, (lambda engine: None) if is_ahead else check_bounds)
    check_bounds(engine)
    parts = engine.components
    parts.pool.check_integrity([])
    if story == "preempted, swapped":
        assert parts.mover is not None
        assert parts.mover.stats.loaded_bytes > 0, "no block was swapped out and in"
    if story == "forks, prefix hits":
        assert (parts.pool.ledger.prefix_hits > 0).any()


def test_key_bounds_of_sparse_decode_count_in_block_size_and_memory(make_engine: Make, deep_model: str) -> None:
    plain, sparse = (make_engine(model=deep_model, sparse_decode=fraction) for fraction in (None, 0.5))
    bounds = 2 * (2 * 2 * 16 * 4)
    assert sparse.hello.cache.block_bytes == plain.hello.cache.block_bytes + bounds
    assert sparse.memory().kv_bytes == plain.memory().kv_bytes + 256 * bounds
    asked = {"num_gpu_blocks_override": None, "kv_memory_bytes": 1 << 20}
    sized = make_engine(model=deep_model, sparse_decode=0.5, **asked)
    assert sized.hello.cache.num_blocks == (1 << 20) // sparse.hello.cache.block_bytes


REFUSED: dict[str, dict[str, Any]] = {
    "above 0 and at most 1": {"sparse_decode": 1.5},
    "sparse_decode=0 ": {"sparse_decode": 0},
    "sparse_decode=nan": {"sparse_decode": float("nan")},
    "sparse_decode=True": {"sparse_decode": True},
    "--speculative-config": {
        "sparse_decode": 0.5,
        "speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_sparse_decode_with_an_unsupported_option_is_refused(words: str) -> None:
    with pytest.raises(BadInput, match=words):
        EngineConfig(**REFUSED[words])


def test_model_without_layers_that_choose_is_refused(make_engine: Make, tiny_model: Callable[..., str]) -> None:
    with pytest.raises(BadInput, match=r"sparse_decode=0\.5 is not accepted with .*behind its first 2 layers"):
        make_engine(model=tiny_model(), sparse_decode=0.5)


def test_skipped_blocks_are_reported_and_cleared_at_the_end(make_engine: Make, deep_model: str) -> None:
    engine = make_engine(model=deep_model, sparse_decode=0.2, enable_prefix_caching=False)
    assert engine.hello.capabilities.sparse_decode
    submit(engine, range(3, 83), 6)
    engine.step()
    engine.step()
    while engine.has_unfinished and not engine.components.pool.ledger.skipped.any():
        engine.step()
    ledger = engine.components.pool.ledger
    (request,) = engine.components.scheduler.requests.values()
    shares = [skipped_share(int(units)) for units in ledger.skipped[request.block_table[: 83 // 4]]]
    assert shares[0] == 0.0, "the first block is always read"
    assert all(share is not None for share in shares)
    assert max(share or 0.0 for share in shares) > 0.5
    attended = sum(1.0 - (share or 0.0) for share in shares)
    assert attended == pytest.approx(
        PageChoice(0.2, 4, engine.components.runner._ops).num_attended(len(shares)), abs=1.01
    )
    run(engine)
    assert not ledger.skipped.any()
    assert not make_engine(model=deep_model).hello.capabilities.sparse_decode
