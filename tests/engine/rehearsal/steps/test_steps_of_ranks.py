"""Two ranks on emulated GPUs in one process: both replay the same graphs, chosen by size, with the all-reduces in
them.

The group is emulated: sums are counted, and rank 0's messages are read by the other rank immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from tests.engine.rehearsal.steps.test_expert_steps import QWEN3

from kvscope_engine.model.cuda_graphs.shared_graphs import FAILED_ON_OTHER_RANK
from kvscope_engine.model.executor.rank_messages import Step, decode_to_rank, encode, inputs_of, step_of
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

SIZES = (1, 2, 4, 8)
SUMS_A_PASS = 4
"""Two sums per layer, with two layers."""


class FollowerRank:
    """The other rank, which runs the steps that it receives."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[Step] = []
        self.num_shared: list[int] = []
        self._inputs: Any = None

    def send_step(
        self,
        inputs: StepInputs,
        copies: Sequence[tuple[int, int]],
        lora_slots: NDArray[Any] | None = None,
        num_sampled: int = 0,
        graph_size: int = 0,
    ) -> None:
        step = decode_to_rank(encode(step_of(inputs, copies, lora_slots, num_sampled, graph_size)))
        assert isinstance(step, Step)
        self.steps.append(step)
        if step.num_sampled == 0:
            self._run(None)

    def broadcast_tokens(self, tokens: torch.Tensor) -> None:
        assert tokens.shape == (self.steps[-1].num_sampled,)
        self._run(tokens)

    def wait_for(self, event: Any) -> None:
        event.synchronize()

    def report_step_done(self) -> None: ...

    def _run(self, sampled: torch.Tensor | None) -> None:
        step = self.steps[-1]
        self.runner.run_as_follower(*inputs_of(step), sampled, step.graph_size)


class ScriptedAgreement:
    """The other rank's answers for each size, in order; yes if none is given."""

    def __init__(self, *theirs: bool) -> None:
        self._theirs = list(theirs)
        self.ours: list[bool] = []

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_agree(self, is_well: bool) -> bool:
        self.ours.append(is_well)
        theirs = self._theirs.pop(0) if self._theirs else True
        return is_well and theirs


def decodes(count: int, *, length: int = 20) -> StepPlan:
    def one(number: int) -> Scheduled:
        request = Request(
            number=number,
            request_id=f"r{number}",
            prompt_token_ids=[7] * (length - 1),
            sampling=ResolvedSampling(temperature=0.0),
            max_tokens=99,
            arrival_ns=0,
            output_token_ids=[3],
            block_tables=([0, 1, 2],),
        )
        return Scheduled(request, length - 1, 1, True)

    return StepPlan(tuple(one(number) for number in range(count)), count)


def after(plan: StepPlan) -> StepPlan:
    """Return the next step of the same requests, whose tokens are unknown."""
    return StepPlan(
        tuple(Scheduled(item.request, item.start + 1, 1, True) for item in plan.scheduled), plan.num_single_token
    )


@pytest.fixture
def sums() -> list[int]:
    """Number of rows of each sum reached by the host, whether a graph records it or the device computes it."""
    return []


@pytest.fixture
def ranks(fake_gpu: Any, sums: list[int]) -> tuple[ModelRunner, FollowerRank]:
    def all_reduce(part: torch.Tensor) -> torch.Tensor:
        sums.append(part.shape[0])
        return part

    follower = FollowerRank(fake_gpu.make_runner(together=True, all_reduce=all_reduce))
    runner = fake_gpu.make_runner(together=True, others=follower, all_reduce=all_reduce)
    for each in (runner, follower.runner):
        each.warm_up(lambda _: None)
        assert each.captures_shared_graphs
    return runner, follower


def test_all_sizes_are_captured_at_the_start_and_replayed_by_both_ranks(
    fake_gpu: Any, ranks: tuple[ModelRunner, FollowerRank], sums: list[int]
) -> None:
    runner, follower = ranks
    for each in (runner, follower.runner):
        meeting = ScriptedAgreement()
        sums.clear()
        each.capture_shared_graphs(meeting)
        assert meeting.ours == [True] * len(SIZES)
        assert each.notes == []
        passes = [size for size in reversed(SIZES) for _ in range(2)]
        assert sums == [size for size in passes for _ in range(SUMS_A_PASS)], "outside each graph, and in it"
    sums.clear()
    for count, size in ((1, 1), (3, 4), (8, 8)):
        fake_gpu.seen.clear()
        assert runner.run(decodes(count)).graph_size == size
        assert follower.steps[-1].graph_size == size
        assert fake_gpu.seen.replays == 2, "one graph per rank"
        assert fake_gpu.seen.read_backs == 1, "only rank 0's tokens are read back"
    assert sums == [], "all sums must be in the graphs"


@pytest.mark.storm({"is_ours": True, "compiles": True})
@pytest.mark.parametrize(("is_ours", "compiles"), [(True, True), (False, True), (True, False)])
def test_failed_capture_on_one_rank_drops_its_size_on_both(
    is_ours: bool, compiles: bool, fake_gpu: Any, ranks: tuple[ModelRunner, FollowerRank]
) -> None:
    """The next larger size is used; nothing is captured later, not even when idle."""
    runner, follower = ranks
    too_large = import_module("triton.runtime.errors").OutOfResources(2 << 17, 1 << 16, "shared memory")
    error = RuntimeError("CUDA error: this card is full") if compiles else too_large
    failing, other = (runner, follower.runner) if is_ours else (follower.runner, runner)
    before = ScriptedAgreement()
    fake_gpu.capture_error[:] = [None, None, error, None]  # for sizes 1, 2, 4 and 8; the last error is raised first
    failing.capture_shared_graphs(before)
    assert before.ours == [True, False, True, True]
    other.capture_shared_graphs(ScriptedAgreement(*before.ours))
    assert len(failing.notes) == len(other.notes) == 1
    assert "batches of 4" in failing.notes[0]
    assert str(error) in failing.notes[0]
    assert other.notes == [f"no CUDA graph for batches of 4, which run slower: {FAILED_ON_OTHER_RANK}"]
    for _ in range(3):
        runner.run(decodes(3))
        runner.do_idle_work()
        assert follower.steps[-1].graph_size == 8
    runner.run(decodes(2))
    assert follower.steps[-1].graph_size == 2


def test_without_any_graph_both_ranks_run_eagerly_and_report_why(
    fake_gpu: Any, ranks: tuple[ModelRunner, FollowerRank], sums: list[int]
) -> None:
    runner, follower = ranks
    for each in (runner, follower.runner):
        each.capture_shared_graphs(ScriptedAgreement(*(False,) * len(SIZES)))
    assert runner.notes == [
        f"CUDA graphs could not be captured, steps run without them (slower): {FAILED_ON_OTHER_RANK}"
    ]
    sums.clear()
    assert runner.run(decodes(2)).graph_size == 0
    assert follower.steps[-1].graph_size == 0
    assert fake_gpu.seen.replays == 0
    assert sums == [2] * (2 * SUMS_A_PASS), "sums of two rows, on each rank"


@pytest.mark.storm({"is_ours": True})
@pytest.mark.parametrize("is_ours", [True, False], ids=["rank 0", "another rank"])
def test_graphs_impossible_on_one_rank_are_dropped_on_all(
    is_ours: bool, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 then requests none. Another rank that alone finds it impossible says no to each size, so that no rank
    waits for it.
    """

    def made(reads: bool, **options: Any) -> ModelRunner:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9) if reads else (9, 0))
        runner: ModelRunner = fake_gpu.make_runner(together=True, fuses_experts=False, **QWEN3, **options)
        runner.warm_up(lambda _: None)
        return runner

    follower = FollowerRank(made(not is_ours))
    runner = made(is_ours, others=follower)
    assert runner.captures_shared_graphs is not is_ours
    assert runner.captures_shared_graphs or runner.notes[0].startswith("CUDA graphs could not be captured")
    if runner.captures_shared_graphs:
        theirs = ScriptedAgreement()
        follower.runner.capture_shared_graphs(theirs)
        assert theirs.ours == [False] * len(SIZES)
        runner.capture_shared_graphs(ScriptedAgreement(*theirs.ours))
    assert runner.run(decodes(2)).graph_size == 0
    assert follower.steps[-1].graph_size == 0
    assert fake_gpu.seen.replays == 0
    assert not runner.do_idle_work()


def test_overlapped_step_is_sent_before_its_tokens_are_known(
    fake_gpu: Any, ranks: tuple[ModelRunner, FollowerRank]
) -> None:
    """Tokens go from device to device: nothing is read back in between, and the host does not wait."""
    runner, follower = ranks
    for each in (runner, follower.runner):
        each.capture_shared_graphs(ScriptedAgreement())
    plan = decodes(3)
    first = runner.launch(plan)
    fake_gpu.seen.clear()
    second = runner.launch(after(plan), first)
    assert follower.steps[-1].num_sampled == 3
    assert follower.steps[-1].graph_size == 4
    assert fake_gpu.seen.waits == 0
    assert fake_gpu.seen.replays == 2
    first.result()
    second.result()
