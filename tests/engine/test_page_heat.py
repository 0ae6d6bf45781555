"""An engine that measures attention per block: its ledger, when it measures, and when values are cleared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.layers.attention.sparse import page_choice
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState, attention_shares
from kvscope_telemetry.messages.commands import Submit

Make = Callable[..., Engine]


def submit(engine: Engine, name: str, num_prompt_tokens: int, max_tokens: int, first: int = 3) -> None:
    ids = tuple(range(first, first + num_prompt_tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Submit(request_id=name, prompt_token_ids=ids, sampling=sampling))


def shares_by_request(engine: Engine, step: int) -> dict[int, float]:
    """Return the sums over the blocks that were measured in `step`."""
    parts = engine.components
    ledger, sums = parts.pool.ledger, {}
    for number, request in parts.scheduler.requests.items():
        table = np.array(request.block_table, np.int64)
        table = table[ledger.attention_step[table] == step]
        if table.size:
            sums[number] = float(attention_shares(ledger.attention[table]).sum())
    return sums


@pytest.mark.parametrize("sparse_decode", [None, 0.4])
def test_shares_of_each_request_sum_to_one_in_every_measured_step(
    make_engine: Make, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, sparse_decode: float | None
) -> None:
    monkeypatch.setattr(page_choice, "MIN_TOKENS", 4)
    model = tiny_model(num_hidden_layers=3)
    engine = make_engine(model=model, page_heat=3, num_gpu_blocks_override=60, sparse_decode=sparse_decode)
    submit(engine, "a", 30, 20)
    submit(engine, "b", 7, 20, first=90)
    shares = {}
    for _ in range(12):
        engine.step()
        if sums := shares_by_request(engine, engine.step_count):
            shares[engine.step_count] = sums
    assert list(shares) == [2, 5, 8, 11], "not the first step with decodes and every third after it"
    for sums in shares.values():
        assert sums == {1: pytest.approx(1.0, abs=1e-4), 2: pytest.approx(1.0, abs=1e-4)}


def test_measuring_attention_changes_no_tokens(make_engine: Make) -> None:
    answers = []
    for options in ({}, {"page_heat": 1}):
        engine: Any = make_engine(num_gpu_blocks_override=60, **options)
        prompts: list[str | Submit] = ["Hello", "A fox in the forest"]
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        answers.append([done.token_ids for done in engine.generate(prompts, sampling)])
    assert answers[0] == answers[1]


def test_without_the_option_nothing_is_measured_or_sent(make_engine: Make) -> None:
    engine = make_engine(num_gpu_blocks_override=60)
    submit(engine, "a", 30, 20)
    for _ in range(5):
        engine.step()
    blocks = engine.snapshot().blocks
    assert (blocks.attention, blocks.attention_step) == (b"", b"")
    assert not engine.hello.capabilities.attention


def test_freed_block_has_no_attention_value(make_engine: Make) -> None:
    engine = make_engine(page_heat=1, num_gpu_blocks_override=60, enable_prefix_caching=False)
    assert engine.hello.capabilities.attention
    submit(engine, "a", 30, 4)
    while engine.has_unfinished:
        engine.step()
    ledger = engine.components.pool.ledger
    assert (ledger.state == BlockState.FREE).all()
    assert not ledger.attention.any()
    assert not ledger.attention_step.any()
    engine.components.pool.check_integrity([])


def test_shared_block_keeps_the_largest_attention_value_of_its_requests(make_engine: Make) -> None:
    pool = make_engine(num_gpu_blocks_override=60).components.pool
    blocks = pool.allocate(2, 1)
    ids = np.array([blocks[0], blocks[1], blocks[0]], np.int64)
    pool.record_attention(ids, np.array([700, 5, 30], np.uint32), 9)
    assert pool.ledger.attention[blocks].tolist() == [700, 5]
    assert pool.ledger.attention_step[blocks].tolist() == [9, 9]


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_invalid_page_heat_interval_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="page_heat="):
        EngineConfig(page_heat=value)
