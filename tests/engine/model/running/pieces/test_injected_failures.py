"""An engine in which captures and allocations fail a hundred times at random: only who fails alone ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.model.running.pieces.test_storms import numbers
from tests.engine.test_step_loop import close_to, jobs_of, said_by

from kvscope_engine import Engine
from kvscope_engine.model.running import capture_failures
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.pieces.mixed_graphs import MixedGraphs
from kvscope_engine.model.running.pieces.recorder import Recorder

NUM_FAILURES = {"capture": 30, "allocation": 70}
SHORTAGES = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


class Injector:
    """Makes calls fail at random, so many times of each kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.left = dict(NUM_FAILURES)

    def wrap(self, kind: str, chance: float, errors: tuple[Exception, ...], function: Callable[..., Any]) -> Any:
        """`function`, which fails before it does anything, or behind what it did."""

        def call(*args: Any, **kwargs: Any) -> Any:
            fails = self.left[kind] > 0 and self.random.random() < chance
            is_late = fails and self.random.random() < 0.5
            result = function(*args, **kwargs) if is_late or not fails else None
            if fails:
                self.left[kind] -= 1
                raise self.random.choice(errors)
            return result

        return call


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "a step ahead"])
def test_a_hundred_failures_lose_no_request_that_can_be_run(
    make_small: Callable[..., Engine],
    make_engine: Callable[..., Engine],
    cpu_graphs: Any,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
) -> None:
    """Tokens are those of a run without failures, and a minute later every size has its graphs.

    Only a request whose step failed each time, down to it alone, ends.
    """
    jobs = jobs_of(21)
    with make_small(num_gpu_blocks_override=2048, max_num_seqs=32) as calm:
        expected = [(one.token_ids, one.finish_reason, one.logprobs) for one in calm.generate(jobs)]
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    injector = Injector(1 + overlaps)
    engine = make_engine(async_scheduling=overlaps, num_gpu_blocks_override=64, max_num_batched_tokens=40)
    runner: Any = engine.components.runner
    mixed: MixedGraphs = runner._mixed
    sizes = mixed.sizes
    monkeypatch.setattr(Recorder, "record", injector.wrap("capture", 0.4, SHORTAGES, Recorder.record))
    for name in ("logits", "fill", "logits_of"):
        monkeypatch.setattr(Forward, name, injector.wrap("allocation", 0.2, SHORTAGES, getattr(Forward, name)))
    rounds = num_lost = 0
    while any(injector.left.values()):
        rounds += 1
        assert rounds < 50, injector.left
        for said, wanted in zip(numbers(said_by(engine, jobs)), close_to(expected), strict=True):
            if said[1] == "error":  # the step held it, and failed alone as often as it was tried
                num_lost += 1
                assert said[0] == wanted[0][: len(said[0])]
            else:
                assert said == wanted
        runner.release_graphs()  # as a step does for which there is no memory a second time
        for _ in range(8):
            now_s += 8.0
            engine.while_idle()
    assert num_lost <= 5
    for _ in range(60):
        now_s += 1.0
        engine.while_idle()
    assert set(mixed._captured) == set(sizes)
    assert numbers(said_by(engine, jobs)) == close_to(expected)
    assert not any(engine.snapshot().blocks.ref_count)
    engine.components.scheduler.check_integrity()
