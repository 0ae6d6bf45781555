"""Estimates of what a prompt would cost: correct, and without any effect on the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvscope_engine import Engine, SamplingParams
from kvscope_telemetry.messages.commands import PromptEstimate, Submit

PROMPT = list(range(3, 43))
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def submit(engine: Engine, name: str, ids: list[int]) -> None:
    engine.submit(Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=GREEDY))


def estimate(engine: Engine, ids: list[int]) -> PromptEstimate:
    return engine.estimate_prompt(Submit(request_id="e"), ids)


def test_estimate_counts_the_cached_blocks_that_a_request_then_reuses(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    unknown = estimate(engine, PROMPT)
    assert (unknown.num_prompt_tokens, unknown.num_cached_tokens, unknown.ttft_s) == (40, 0, None)
    submit(engine, "a", PROMPT)
    while engine.has_unfinished:
        engine.step()
    known = estimate(engine, [*PROMPT, 50, 51])
    assert (known.num_prompt_tokens, known.num_cached_tokens) == (42, 40)
    assert known.max_request_tokens == engine.hello.cache.max_request_tokens
    submit(engine, "b", [*PROMPT, 50, 51])
    finished = [output for _ in range(8) for output in engine.step() if hasattr(output, "usage")]
    assert [end.usage.cached_tokens for end in finished] == [known.num_cached_tokens]


def test_estimate_changes_no_block_and_records_no_request(make_engine: Callable[..., Engine]) -> None:
    published: list[Any] = []
    engine = make_engine(publish=published.append)
    for name, first in (("a", 3), ("b", 53)):
        submit(engine, name, list(range(first, first + 40)))
        while engine.has_unfinished:
            engine.step()
    before, num_published = engine.snapshot(), len(published)
    estimate(engine, PROMPT)
    after = engine.snapshot()
    assert (after.blocks, after.requests, after.counters) == (before.blocks, before.requests, before.counters)
    assert len(published) == num_published


def test_time_to_first_token_is_unknown_if_no_place_is_free_and_includes_prompts_ahead(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_num_seqs=2)
    submit(engine, "a", PROMPT)
    while engine.has_unfinished:
        engine.step()
    prompt = list(range(60, 100))
    alone = estimate(engine, prompt)
    submit(engine, "b", list(range(100, 180)))
    behind = estimate(engine, prompt)
    assert alone.ttft_s is not None
    assert behind.ttft_s is not None
    assert behind.ttft_s > alone.ttft_s
    assert behind.num_waiting == 1
    submit(engine, "c", list(range(180, 200)))
    assert estimate(engine, prompt).ttft_s is None
