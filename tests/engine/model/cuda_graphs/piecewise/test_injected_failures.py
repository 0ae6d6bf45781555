"""An engine in which captures, allocations and libraries fail a hundred times at random: requests in other steps lose
nothing, requests in a failed step survive passing failures, and a minute later everything is as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.test_step_loop import close_to, generated, jobs_of, numbers

from kvscope_engine import Engine
from kvscope_engine.model.cuda_graphs import capture_failures
from kvscope_engine.model.cuda_graphs.piecewise.piece_recorder import PieceRecorder
from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import PiecewiseGraphs
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.layers.sampling.sampler import Sampler
from kvscope_engine.policy.step_plan import StepPlan

NUM_FAILURES = {"capture": 30, "allocation": 35, "library": 35}
SHORTAGES = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)
OF_LIBRARIES = (
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("CUDA error: unspecified launch failure"),
)


class Injector:
    """Makes calls fail at random, a given number of times per kind; at most `most_in_a_row` tries of one step fail."""

    def __init__(self, seed: int, most_in_a_row: int) -> None:
        self.random = random.Random(seed)
        self.left = dict(NUM_FAILURES)
        self.alone: set[int] = set()
        """Numbers of requests that were the whole of a try that failed."""
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0

    def wrap(self, kind: str, chance: float, errors: tuple[Exception, ...], function: Callable[..., Any]) -> Any:
        """Wrap `function` so that it may fail before or after it ran."""

        def call(*args: Any, **kwargs: Any) -> Any:
            may_fail = kind == "capture" or self._in_a_row < self._most_in_a_row
            fails = may_fail and self.left[kind] > 0 and self.random.random() < chance
            is_late = fails and self.random.random() < 0.5
            result = function(*args, **kwargs) if is_late or not fails else None
            if fails:
                self.left[kind] -= 1
                self._in_a_row += kind != "capture"
                raise self.random.choice(errors)
            return result

        return call

    def watch(self, launch: Callable[..., Any]) -> Any:
        """Wrap a runner's `launch` to record which of its tries fail."""

        def call(plan: StepPlan, *args: Any) -> Any:
            try:
                launched = launch(plan, *args)
            except RuntimeError:
                if len(plan.scheduled) == 1:
                    self.alone.add(plan.scheduled[0].request.number)
                raise
            self._in_a_row = 0
            return launched

        return call


@pytest.mark.storm({"overlaps": False})
@pytest.mark.parametrize("most_in_a_row", [2, 99], ids=["that pass", "however often"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "a step ahead"])
def test_hundred_random_capture_and_memory_failures_lose_no_request(
    make_small: Callable[..., Engine],
    make_engine: Callable[..., Engine],
    cpu_graphs: Any,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    most_in_a_row: int,
) -> None:
    """The tokens equal those of a run without failures. By an adjustable clock, a minute later every size has its
    graphs and steps have their full size. A request ends only if its step failed each time, down to a batch of one: no
    passing failure does that.
    """
    jobs = jobs_of(21)
    with make_small(num_gpu_blocks_override=2048, max_num_seqs=32) as calm:
        expected = [(one.token_ids, one.finish_reason, one.logprobs) for one in calm.generate(jobs)]
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(capture_failures.time, "monotonic_ns", lambda: int(now_s * 1e9))
    injector = Injector(1 + overlaps, most_in_a_row)
    engine = make_engine(async_scheduling=overlaps, num_gpu_blocks_override=64, max_num_batched_tokens=40)
    runner: Any = engine.components.runner
    scheduler = engine.components.scheduler
    limits = scheduler.limits.max_step_requests, scheduler.limits.max_step_tokens
    mixed: PiecewiseGraphs = runner._piecewise_graphs
    sizes = mixed.sizes
    monkeypatch.setattr(runner, "launch", injector.watch(runner.launch))
    monkeypatch.setattr(PieceRecorder, "record", injector.wrap("capture", 0.4, SHORTAGES, PieceRecorder.record))
    for name in ("logits", "fill", "logits_of"):
        broken = injector.wrap("allocation", 0.1, SHORTAGES, getattr(Forward, name))
        monkeypatch.setattr(Forward, name, injector.wrap("library", 0.1, OF_LIBRARIES, broken))
    monkeypatch.setattr(Sampler, "draw", injector.wrap("library", 0.05, OF_LIBRARIES, Sampler.draw))
    rounds, lost = 0, list[int]()
    while any(injector.left.values()):
        rounds += 1
        assert rounds < 50, injector.left
        first = 1 + (rounds - 1) * len(expected)
        for number, (said, wanted) in enumerate(
            zip(numbers(generated(engine, jobs)), close_to(expected), strict=True), start=first
        ):
            if said[1] == "error":
                lost.append(number)
                assert said[0] == wanted[0][: len(said[0])]
            else:
                assert said == wanted
        runner.release_graphs()  # like a step that fails a second time
        for _ in range(8):
            now_s += 8.0
            engine.while_idle()
    assert set(lost) <= injector.alone
    assert most_in_a_row > 2 or not lost
    for _ in range(60):
        now_s += 1.0
        engine.while_idle()
    assert set(mixed._captured) == set(sizes)
    assert (scheduler.limits.max_step_requests, scheduler.limits.max_step_tokens) == limits
    assert any(note.startswith("a step failed and was run again") for note in engine.notes)
    assert numbers(generated(engine, jobs)) == close_to(expected)
    assert not any(engine.snapshot().blocks.ref_count)
    scheduler.check_integrity()
