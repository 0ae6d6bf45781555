"""Prefill by FlashInfer on an emulated GPU: where its plan's tensors are, and that the host never waits for it."""

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
from kvscope_kernels.third_party_attention.prefill_with_fallback import with_library_prefill
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

PAGES = 3 + 2  # blocks of 16 tokens: 41 tokens in one chunk, 30 including those computed before


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


class RecordingWrapper:
    """FlashInfer's wrapper, recording its arguments."""

    planned: ClassVar[list[list[tuple[str, tuple[int, ...]]]]] = []
    runs = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert (workspace.device.type, layout) == ("cuda", "HND")

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.planned.append([(each.device.type, tuple(each.shape)) for each in arguments[:4]])
        assert arguments[4:] == (4, 2, 64, 16)

    def run(self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        RecordingWrapper.runs += 1
        assert query.shape == out.shape
        assert all(cache.shape[1:] == (2, 16, 64) for cache in caches)


@pytest.mark.parametrize("options", [{}, {"piecewise_graphs": True}])
def test_flashinfer_prefill_is_planned_once_per_step_on_the_host(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=RecordingWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(RecordingWrapper, "planned", [])
    monkeypatch.setattr(RecordingWrapper, "runs", 0)
    runner = fake_gpu.make_runner(ops=with_library_prefill(ops_for("cuda"), FlashInfer()), num_layers=2, **options)
    runner.warm_up(lambda _: None)
    assert RecordingWrapper.runs == 0, "what attends to nothing is ours"
    known = set(fake_gpu.seen.compiled)
    prompts = [Scheduled(make_request(2, 41), 0, 41, True), Scheduled(make_request(3, 30), 10, 20, True)]
    plan = StepPlan((Scheduled(make_request(1, 50, 1), 50, 1, True), *prompts), 1)
    for step in range(1, 4):
        fake_gpu.seen.clear()
        runner.run(plan)
        assert (len(RecordingWrapper.planned), RecordingWrapper.runs) == (step, 2 * step)
        assert RecordingWrapper.planned[-1] == [("cpu", (3,)), ("cpu", (3,)), ("cuda", (PAGES,)), ("cpu", (2,))]
        assert fake_gpu.seen.launches["paged_prefill_attention"] == 0
        assert fake_gpu.seen.launches["paged_decode_attention"] == 2
        assert fake_gpu.seen.read_backs == 1, "only the sampled tokens are read back"
    assert fake_gpu.seen.compiled == known
    assert runner.notes == []
