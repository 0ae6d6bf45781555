"""Prompts by FlashInfer, on a GPU that is not there: where its plan's tensors lie, and that nobody waits for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_kernels.dispatch import ops_for
from kvscope_kernels.third_party_attention.flashinfer import FlashInfer
from kvscope_kernels.third_party_attention.preferred import preferring
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

PAGES = 3 + 2  # of 16 tokens: 41 in one chunk, 30 with what was computed before


def make_request(number: int, num_prompt: int, num_output: int = 0) -> Request:
    return Request(
        number=number,
        request_id=f"r{number}",
        prompt_token_ids=[7] * num_prompt,
        sampling=ResolvedSampling(temperature=0.0),
        max_tokens=99,
        arrival_ns=0,
        output_token_ids=[3] * num_output,
        block_tables=(list(range(num_prompt // 16 + 2)),),
    )


class Wrapper:
    """FlashInfer's, which writes down what it is given."""

    planned: ClassVar[list[list[tuple[str, tuple[int, ...]]]]] = []
    runs = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert (workspace.device.type, layout) == ("cuda", "HND")

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.planned.append([(each.device.type, tuple(each.shape)) for each in arguments[:4]])
        assert arguments[4:] == (4, 2, 64, 16)

    def run(self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        Wrapper.runs += 1
        assert query.shape == out.shape
        assert all(cache.shape[1:] == (2, 16, 64) for cache in caches)


@pytest.mark.parametrize("options", [{}, {"piecewise_graphs": True}])
def test_is_planned_once_a_step_on_the_host(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(Wrapper, "planned", [])
    monkeypatch.setattr(Wrapper, "runs", 0)
    runner = fake_gpu.make_runner(ops=preferring(ops_for("cuda"), FlashInfer()), num_layers=2, **options)
    runner.warm_up(lambda _: None)
    assert Wrapper.runs == 0, "what attends to nothing is ours"
    known = set(fake_gpu.seen.compiled)
    prompts = [Scheduled(make_request(2, 41), 0, 41, True), Scheduled(make_request(3, 30), 10, 20, True)]
    plan = StepPlan((Scheduled(make_request(1, 50, 1), 50, 1, True), *prompts), 1)
    for step in range(1, 4):
        fake_gpu.seen.clear()
        runner.run(plan)
        assert (len(Wrapper.planned), Wrapper.runs) == (step, 2 * step)
        assert Wrapper.planned[-1] == [("cpu", (3,)), ("cpu", (3,)), ("cuda", (PAGES,)), ("cpu", (2,))]
        assert fake_gpu.seen.launches["paged_prefill_attention"] == 0
        assert fake_gpu.seen.launches["paged_decode_attention"] == 2
        assert fake_gpu.seen.read_backs == 1, "the sampled tokens"
    assert fake_gpu.seen.compiled == known
    assert runner.notes == []
