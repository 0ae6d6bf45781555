"""Steps with prefills in graphs between attention, on a GPU that is not there: what is launched, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvscope_engine.model.running.pieces.mixed_graphs import SIZES
from kvscope_engine.policy.plan import Scheduled, StepPlan
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

NUM_LAYERS = 2


def make_request(number: int, num_prompt: int, num_output: int = 0) -> Request:
    return Request(
        number=number,
        request_id=f"r{number}",
        prompt_token_ids=[7] * num_prompt,
        sampling=ResolvedSampling(temperature=0.0),
        max_tokens=99,
        arrival_ns=0,
        output_token_ids=[3] * num_output,
        block_table=list(range(num_prompt // 16 + 2)),
    )


def mixed(num_decodes: int, *chunks: int, samples: bool = True) -> StepPlan:
    """Decodes beside chunks of prompts."""
    decodes = [Scheduled(make_request(number, 50 + number, 1), 50 + number, 1, True) for number in range(num_decodes)]
    prompts = [make_request(20 + place, count + 5 * (not samples)) for place, count in enumerate(chunks)]
    prefills = [Scheduled(prompt, 0, count, samples) for prompt, count in zip(prompts, chunks, strict=True)]
    return StepPlan((*decodes, *prefills), num_decodes)


def num_tokens(plan: StepPlan) -> int:
    return sum(item.num_tokens for item in plan.scheduled)


STEPS = {
    "beside chunks": mixed(3, 7, 41),
    "a chunk alone": mixed(0, 33),
    "samples of the decodes": mixed(1, 30, samples=False),
    "samples nothing": mixed(0, 200, samples=False),
    "every row is sampled": StepPlan((Scheduled(make_request(1, 30, 1), 30, 3, True, drafts=(5, 6)),), 0),
}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=() if name in ("beside chunks", "samples nothing") else pytest.mark.storm)
        for name, plan in STEPS.items()
    ],
)
def test_a_replay_launches_attention_and_nothing_else_of_a_layer(
    fake_gpu: Any, operations: Any, plan: StepPlan
) -> None:
    """A graph more than there are layers; one copy up, one down, and nothing is compiled."""
    runner = fake_gpu.make_runner(piecewise_graphs=True, num_layers=NUM_LAYERS)
    runner.warm_up(lambda _: None)
    known, found = set(fake_gpu.seen.compiled), []
    for _ in range(3):
        fake_gpu.seen.clear()
        with operations() as counted:
            result = runner.run(plan)
        assert fake_gpu.seen.compiled == known
        assert [len(tokens) for tokens in result.token_ids] == [int(item.samples) for item in plan.scheduled]
        found.append((fake_gpu.seen.replays, len(counted.names), dict(fake_gpu.seen.launches)))
    (no_replays, num_operations, kernels), _, (replays, num_left, left) = found
    assert (no_replays, replays) == (0, NUM_LAYERS + 1)
    assert (result.graph_size, result.graph_tokens) == (0, next(size for size in SIZES if size >= num_tokens(plan)))
    head = {"skinny_linear": 1} if any(item.samples for item in plan.scheduled) else {}
    assert left == head | {name: count for name, count in kernels.items() if "attention" in name or "plan" in name}
    assert set(left.values()) <= {1, NUM_LAYERS}
    launched = num_operations + sum(kernels.values()), replays + num_left + sum(left.values())
    print(f"{launched[0]} launches without graphs, {launched[1]} with them, of which {replays} are graphs")
    assert launched[1] < launched[0]
    samples = any(item.samples for item in plan.scheduled)
    assert (fake_gpu.seen.uploads, fake_gpu.seen.read_backs, fake_gpu.seen.waits) == (1, int(samples), 1)
    assert runner.notes == []


def test_each_layer_more_is_a_graph_and_its_attention(fake_gpu: Any, operations: Any) -> None:
    counts = []
    for num_layers in (2, 4):
        runner = fake_gpu.make_runner(piecewise_graphs=True, num_layers=num_layers)
        for _ in range(3):
            fake_gpu.seen.clear()
            with operations() as counted:
                runner.run(STEPS["beside chunks"])
        counts.append(fake_gpu.seen.replays + len(counted.names) + sum(fake_gpu.seen.launches.values()))
    assert counts[1] - counts[0] == 2 * 3, "decodes, prefills, and what lies between two attentions"


def test_sizes_are_captured_when_they_are_wanted_again(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    replays = []
    for plan in (mixed(1, 9), mixed(1, 100), mixed(2, 5), mixed(0, 3), mixed(0, 65), mixed(1, 511), mixed(1, 510)):
        fake_gpu.seen.clear()
        runner.run(plan)
        replays.append(fake_gpu.seen.replays)
    assert replays == [0, 0, 3, 3, 3, 0, 3]


def test_steps_of_more_tokens_run_eagerly(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    for _ in range(3):
        fake_gpu.seen.clear()
        runner.run(mixed(1, 512))
        assert fake_gpu.seen.replays == 0


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "piecewise_graphs": True}])
def test_only_where_they_are_asked_for(fake_gpu: Any, options: dict[str, bool]) -> None:
    runner = fake_gpu.make_runner(**options)
    fake_gpu.seen.clear()
    for _ in range(3):
        runner.run(mixed(2, 9))
    assert fake_gpu.seen.replays == 0


def test_a_measured_step_is_replayed_as_others_are(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True, page_heat=2)
    replays = []
    for _ in range(6):
        fake_gpu.seen.clear()
        result = runner.run(mixed(2, 9))
        replays.append((fake_gpu.seen.replays, result.block_shares is not None))
    assert replays == [(0, True), (3, False), (3, True), (3, False), (3, True), (3, False)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), AttributeError("no such part")])
def test_a_capture_that_fails_costs_no_request_and_no_graph_of_decodes(fake_gpu: Any, error: Exception) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    runner.warm_up(lambda _: None)
    runner.run(mixed(2, 9))
    fake_gpu.capture_error.append(error)
    for _ in range(3):
        fake_gpu.seen.clear()
        assert all(runner.run(mixed(2, 9)).token_ids)
        assert fake_gpu.seen.replays == 0
    (note,) = runner.notes
    why = f"no CUDA graph for steps with prefills of up to 16 tokens, which run slower: {type(error).__name__}: {error}"
    assert note.startswith(why)
    for _ in range(2):
        fake_gpu.seen.clear()
        runner.run(mixed(2, 30))
    assert fake_gpu.seen.replays > 1, "other sizes have theirs"
    for _ in range(2):
        fake_gpu.seen.clear()
        runner.run(StepPlan(mixed(1).scheduled, 1))
    assert fake_gpu.seen.replays == 1


def test_tokens_in_flight_are_inputs_of_graphs(fake_gpu: Any) -> None:
    """Decodes beside a chunk, each a step ahead of its result."""
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    runner.run(mixed(2, 9))
    first = runner.launch(mixed(2, 9))
    again = [Scheduled(item.request, 51 + place, 1, True) for place, item in enumerate(mixed(2).scheduled)]
    fake_gpu.seen.clear()
    second = runner.launch(StepPlan((*again, *mixed(0, 5).scheduled), 2), first)
    assert (fake_gpu.seen.replays, fake_gpu.seen.uploads, fake_gpu.seen.waits) == (3, 1, 0)
    assert [len(step.result().token_ids) for step in (first, second)] == [3, 3]
