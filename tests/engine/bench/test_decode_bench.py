"""Workloads of `bench decode`: arrivals, generated lengths, and rounds after long contexts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvscope_engine.bench import measure
from kvscope_engine.bench.contenders.llama_cpp import BATCH_TOKENS, LlamaCpp
from kvscope_engine.bench.contenders.ours import OurEngine
from kvscope_engine.bench.contenders.transformers_continuous import TransformersContinuous
from kvscope_engine.bench.long_context.rounds import LongBatch, long_rates
from kvscope_engine.bench.workloads import BenchWorkload, mixed, staggered
from kvscope_telemetry.messages.commands import Finished, RequestTiming, Submit, Usage

IDS = list(range(100))


class FakeLlama(LlamaCpp):
    """Records the batches it gets; a token is its sequence and position."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int, int, bool]]] = []

    def forget(self) -> None:
        self.batches.clear()

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        assert 0 < len(entries) <= BATCH_TOKENS
        self.batches.append(entries)
        return [1000 * sequence + position + 1 for _, position, sequence, wanted in entries if wanted]


class FakeEngine:
    """Returns one token per request and step."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()
        self.arrived: dict[str, int] = {}
        self.num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.left)

    def submit(self, request: Submit) -> None:
        assert request.sampling.max_tokens is not None
        self.left[request.request_id] = request.sampling.max_tokens
        self.arrived[request.request_id] = self.num_steps

    def step(self) -> list[Any]:
        assert self.left
        self.num_steps += 1
        for name in self.left:
            self.left[name] -= 1
        over = [name for name, count in self.left.items() if not count]
        for name in over:
            del self.left[name]
        ends = (
            Finished(request_id=name, finish_reason="length", usage=Usage(), timing=RequestTiming()) for name in over
        )
        return [SimpleNamespace(), *ends]


@pytest.mark.parametrize("make", [mixed, staggered])
def test_llama_cpp_computes_each_token_once(make: Any) -> None:
    workload: BenchWorkload = make(5, IDS)
    llama = FakeLlama()
    llama.run(workload)
    entries = [entry for batch in llama.batches for entry in batch]
    for sequence, (prompt, count) in enumerate(zip(workload.prompts, workload.output_tokens, strict=True)):
        own = [entry for entry in entries if entry[2] == sequence]
        assert [position for _, position, _, _ in own] == list(range(len(prompt) + count - 1))
        said = [1000 * sequence + position for position in range(len(prompt), len(prompt) + count - 1)]
        assert [token for token, _, _, _ in own] == [*prompt, *said]
        assert sum(wanted for _, _, _, wanted in own) == count
    firsts = [next(i for i, batch in enumerate(llama.batches) if any(e[2] == s for e in batch)) for s in range(5)]
    assert all(first >= arrival for first, arrival in zip(firsts, workload.arrivals, strict=True))


def test_benchmark_submits_requests_to_our_engine_at_their_arrival_steps() -> None:
    ours, engine = OurEngine.__new__(OurEngine), FakeEngine()
    ours.engine = engine  # type: ignore[assignment]
    late = BenchWorkload("", ((1,),) * 3, (2, 9, 1), steps_between=4)
    ours.run(late)
    assert engine.arrived == {"0": 0, "1": 2, "2": 8}  # no request waits that could run
    engine.arrived.clear()
    ours.run(BenchWorkload("", ((1,),) * 2, (3, 2)))
    assert len(set(engine.arrived.values())) == 1


@pytest.fixture(scope="module")
def tiny_module() -> Any:
    """A transformers model with random weights."""
    config = AutoConfig.for_model("llama", vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5})
    config.eos_token_id = None  # any token may be an end token, which `generate` would suppress
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.float32).eval()


def test_transformers_continuous_batching_generates_the_requested_tokens(tiny_module: Any) -> None:
    workload = BenchWorkload("two", ((3, 4, 5), tuple(range(6, 40))), (5, 20))
    found = TransformersContinuous(tiny_module).generate(workload)
    for prompt, count, tokens in zip(workload.prompts, workload.output_tokens, found, strict=True):
        given = torch.tensor([prompt])
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        said = tiny_module.generate(given, attention_mask=torch.ones_like(given), **options)
        assert tokens == said[0, len(prompt) :].tolist()


def test_transformers_session_stops_at_its_time_limit(tiny_module: Any) -> None:
    endless = BenchWorkload("endless", ((3, 4, 5), (6, 7)), (50_000, 1))
    with TransformersContinuous(tiny_module).session(endless) as session:
        found = session.generate(endless, limit_s=1.0)
    assert not found.is_whole
    assert len(found.tokens[1]) == 1
    assert 1 < found.num_tokens < 50_000


def test_staggered_workload_differs_from_mixed_only_in_arrivals() -> None:
    together, one_by_one = mixed(4, IDS), staggered(4, IDS)
    assert (together.prompts, together.output_tokens) == (one_by_one.prompts, one_by_one.output_tokens)
    assert together.arrivals == (0, 0, 0, 0)
    assert len(set(one_by_one.arrivals)) == 4


class FakeLong:
    def __init__(self, name: str, log: list[tuple[str, str, int]]) -> None:
        self.name, self._log = name, log

    def fill(self, prompt: Sequence[int]) -> None:
        self._log.append((self.name, "fill", len(prompt)))

    def decode(self, num_tokens: int) -> None:
        self._log.append((self.name, "decode", num_tokens))


def test_long_contexts_are_filled_once_and_measured_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0.0, 100.0, 0.5))
    monkeypatch.setattr(
        measure, "time", SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(clock))
    )
    log: list[tuple[str, str, int]] = []
    batch = LongBatch(2, 30, 5)
    assert batch.name == "2 at 30"
    found = long_rates([FakeLong("a", log), FakeLong("b", log)], batch, IDS, 2, lambda line: None)
    assert log[:4] == [("a", "fill", 30), ("a", "decode", 5), ("b", "fill", 30), ("b", "decode", 5)]
    assert log[4:] == [("a", "decode", 5), ("b", "decode", 5)] * 2
    assert [rate.per_second for rate in found["a"]] == [10.0, 10.0]
    assert batch.length >= 30 + 5 * 3
