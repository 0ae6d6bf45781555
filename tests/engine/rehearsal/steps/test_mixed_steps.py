"""Steps with prefills in piecewise graphs on an emulated GPU: what is launched, and when."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from kvscope_engine.model.cuda_graphs import capture_failures
from kvscope_engine.model.cuda_graphs.decode_graphs import captured_sizes
from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import SIZES
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.telemetry import Progress

NUM_LAYERS = 2
MAX_NUM_SEQS = 8
"""Default number of layers of the runners."""


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


def mixed(num_decodes: int, *chunks: int, samples: bool = True) -> StepPlan:
    """Return a step of decodes and prompt chunks."""
    decodes = [Scheduled(make_request(number, 50 + number, 1), 50 + number, 1, True) for number in range(num_decodes)]
    prompts = [make_request(20 + place, count + 5 * (not samples)) for place, count in enumerate(chunks)]
    prefills = [Scheduled(prompt, 0, count, samples) for prompt, count in zip(prompts, chunks, strict=True)]
    return StepPlan((*decodes, *prefills), num_decodes)


def captures(*errors: Exception | None) -> list[Exception | None]:
    """Return the capture errors of a start: first the decode graphs, then the piecewise ones with one graph more than
    layers.
    """
    pieces = [[error] if error is not None else [None] * (NUM_LAYERS + 1) for error in errors]
    return [*[None] * len(captured_sizes(MAX_NUM_SEQS)), *chain.from_iterable(pieces)][::-1]


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
def test_piecewise_graph_replay_launches_only_attention_outside_the_graphs(
    fake_gpu: Any, operations: Any, plan: StepPlan
) -> None:
    """It has one graph more than layers, one upload, one read-back, and compiles nothing."""
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
    assert len({str(step) for step in found}) == 1, "the first as all others"
    replays, num_left, left = found[0]
    assert replays == NUM_LAYERS + 1
    eager = fake_gpu.make_runner(num_layers=NUM_LAYERS)
    fake_gpu.seen.clear()
    with operations() as counted:
        eager.run(plan)
    assert fake_gpu.seen.replays == 0
    num_operations, kernels = len(counted.names), dict(fake_gpu.seen.launches)
    fake_gpu.seen.clear()
    runner.run(plan)
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


def test_each_additional_layer_adds_one_graph_and_its_attention(fake_gpu: Any, operations: Any) -> None:
    counts = []
    for num_layers in (2, 4):
        runner = fake_gpu.make_runner(piecewise_graphs=True, num_layers=num_layers)
        runner.warm_up(lambda _: None)
        fake_gpu.seen.clear()
        with operations() as counted:
            runner.run(STEPS["beside chunks"])
        counts.append(fake_gpu.seen.replays + len(counted.names) + sum(fake_gpu.seen.launches.values()))
    assert counts[1] - counts[0] == 2 * 3, "decode and prefill attention, and the graph between two layers"


def test_all_sizes_are_captured_at_the_start_and_none_in_a_step(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    told: list[Progress] = []
    runner.warm_up(told.append)
    assert [each.detail for each in told[-2:]] == ["CUDA graphs of decodes", "CUDA graphs of steps with prefills"]
    assert [each.total - each.done for each in told[-2:]] == [2, 1]
    assert runner.notes == []
    fake_gpu.capture_error.append(AssertionError("a step captures"))
    sizes = []
    for plan in (mixed(1, 9), mixed(1, 100), mixed(2, 5), mixed(0, 3), mixed(0, 65), mixed(1, 511), mixed(1, 510)):
        fake_gpu.seen.clear()
        sizes.append(runner.run(plan).graph_tokens)
        assert fake_gpu.seen.replays == NUM_LAYERS + 1
        assert fake_gpu.seen.uploads == 1
    assert sizes == [16, 128, 16, 16, 128, 512, 512]


def test_steps_beyond_the_largest_size_run_eagerly(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    runner.warm_up(lambda _: None)
    for _ in range(3):
        fake_gpu.seen.clear()
        runner.run(mixed(1, 512))
        assert fake_gpu.seen.replays == 0


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "piecewise_graphs": True}])
def test_piecewise_graphs_are_captured_only_if_enabled(fake_gpu: Any, options: dict[str, bool]) -> None:
    runner = fake_gpu.make_runner(**options)
    runner.warm_up(lambda _: None)
    fake_gpu.seen.clear()
    for _ in range(3):
        runner.run(mixed(2, 9))
    assert fake_gpu.seen.replays == 0


def test_step_that_measures_attention_is_replayed_in_piecewise_graphs(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True, page_heat=2)
    runner.warm_up(lambda _: None)
    replays = []
    for _ in range(6):
        fake_gpu.seen.clear()
        result = runner.run(mixed(2, 9))
        replays.append((fake_gpu.seen.replays, result.block_shares is not None))
    assert replays == [(3, True), (3, False), (3, True), (3, False), (3, True), (3, False)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        pytest.param(AttributeError("no such part"), marks=pytest.mark.storm),
    ],
)
def test_failed_capture_costs_no_request_and_no_decode_graph(fake_gpu: Any, error: Exception) -> None:
    """The step uses the next larger size; the largest size has none and runs eagerly."""
    for size in SIZES:
        runner = fake_gpu.make_runner(piecewise_graphs=True)
        fake_gpu.capture_error[:] = captures(*(error if each == size else None for each in SIZES[::-1]))
        runner.warm_up(lambda _: None)
        (note,) = runner.notes
        words = f"no CUDA graph for steps with prefills of {size} tokens, which run slower: {type(error).__name__}: "
        assert note.startswith(f"{words}{error}")
        larger = next((each for each in SIZES if each > size), 0)
        for each in SIZES:
            result = runner.run(mixed(0, each))
            assert all(result.token_ids)
            assert result.graph_tokens == (each if each != size else larger)
        for _ in range(2):
            fake_gpu.seen.clear()
            runner.run(StepPlan(mixed(1).scheduled, 1))
        assert fake_gpu.seen.replays == 1
        assert runner.notes == [note]


def test_model_that_cannot_be_split_is_reported_once(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    fake_gpu.capture_error[:] = captures(*(AttributeError("no such part") for _ in SIZES))
    runner.warm_up(lambda _: None)
    assert runner.notes == ["no CUDA graph for steps with prefills, which run slower: AttributeError: no such part"]
    assert runner.run(mixed(0, 9)).graph_tokens == 0
    fake_gpu.capture_error.append(AssertionError("the capture must not be tried again"))
    runner.do_idle_work()


def test_capture_without_memory_is_tried_again_when_idle(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One size at a time, after a pause, with one notice for each change."""
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    no_memory = torch.OutOfMemoryError("CUDA out of memory")
    fake_gpu.capture_error[:] = captures(no_memory, no_memory)
    runner.warm_up(lambda _: None)
    notes = list(runner.notes)
    assert [note.split(" tokens")[0].split()[-1] for note in notes] == ["512", "256"]
    for _ in range(3):
        runner.do_idle_work()
        assert runner.run(mixed(0, 300)).graph_tokens == 0, "too early"
    now_s += capture_failures.FIRST_PAUSE_S
    assert runner.run(mixed(0, 300)).graph_tokens == 0, "not in a step"
    fake_gpu.capture_error.append(no_memory)
    runner.do_idle_work()
    assert runner.run(mixed(0, 200)).graph_tokens == 0, "there was no memory for the larger one yet"
    runner.do_idle_work()
    assert [runner.run(mixed(0, count)).graph_tokens for count in (200, 300)] == [256, 0]
    now_s += capture_failures.MAX_PAUSE_S
    runner.do_idle_work()
    assert [runner.run(mixed(0, count)).graph_tokens for count in (200, 300)] == [256, 512]
    again = [f"steps with prefills of {size} tokens have a CUDA graph again" for size in (256, 512)]
    assert runner.notes == notes + again


def test_all_sizes_are_captured_once_there_is_memory(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new pool, because torch has freed the unused one."""
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    fake_gpu.capture_error[:] = captures(*[torch.OutOfMemoryError("CUDA out of memory")] * len(SIZES))
    runner.warm_up(lambda _: None)
    assert len(fake_gpu.pools) == 1 + len(SIZES), "one of decodes, and those that nobody has"
    now_s += capture_failures.FIRST_PAUSE_S
    for _ in SIZES:
        runner.do_idle_work()
    assert [runner.run(mixed(0, size)).graph_tokens for size in SIZES] == list(SIZES)
    assert len(fake_gpu.pools) == 2 + len(SIZES), "all sizes share one pool"


def test_failed_graphs_are_freed_before_the_next_capture(fake_gpu: Any) -> None:
    """Their activations are freed as well, before memory is returned to the driver. Their pool stays while other
    graphs use it, except after a refused capture, whose pool torch never frees.
    """
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    no_memory = torch.OutOfMemoryError("CUDA out of memory")
    refused = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    whole = [None] * (NUM_LAYERS + 1)
    pieces = [None, no_memory, None, no_memory, *whole, None, refused, *whole]  # 512 and 256; 128; 64; 32
    fake_gpu.capture_error[:] = [*captures()[::-1], *pieces][::-1]
    runner.warm_up(lambda _: None)
    decodes, mixed_ones = fake_gpu.held[: len(captures())], fake_gpu.held[len(captures()) :]
    assert decodes == [0, 1, 2, 3]
    assert mixed_ones == [4, 5, 4, 5, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11, 12]
    assert fake_gpu.held_when_emptied == [4, 4, 7]
    assert [len(graphs) for graphs in fake_gpu.pools.values()] == [4, 0, 0, 3, 6]


def test_released_piecewise_graphs_are_captured_again_largest_first(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller sizes use the memory of the largest."""
    now_s = 1000.0
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s)
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    runner.warm_up(lambda _: None)
    runner.release_graphs()
    now_s += capture_failures.FIRST_PAUSE_S
    order: list[int] = []
    while len(order) < len(SIZES):
        assert runner.do_idle_work() or len(order) == len(SIZES) - 1
        order += [size for size in SIZES if size not in order and runner.run(mixed(0, size)).graph_tokens == size]
    assert order == list(SIZES[::-1])


def test_piecewise_graph_capture_refused_by_cuda_is_not_tried_again(fake_gpu: Any) -> None:
    """Each try would leak a pool that is never freed."""
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    fake_gpu.capture_error[:] = captures(RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    runner.warm_up(lambda _: None)
    (note,) = runner.notes
    assert note.endswith("slower: RuntimeError: CUDA error: operation not permitted when stream is capturing")
    assert not runner.do_idle_work(), "there must be nothing to retry"
    assert [runner.run(mixed(0, size)).graph_tokens for size in SIZES] == [0] * len(SIZES)


def test_idle_engine_without_piecewise_graphs_does_nothing(fake_gpu: Any) -> None:
    runner = fake_gpu.make_runner()
    runner.warm_up(lambda _: None)
    fake_gpu.seen.clear()
    runner.do_idle_work()
    assert (fake_gpu.seen.uploads, fake_gpu.seen.launches.total()) == (0, 0)


def test_piecewise_graphs_read_tokens_of_a_step_still_in_flight(fake_gpu: Any) -> None:
    """Decodes next to a chunk, each scheduled ahead of its result."""
    runner = fake_gpu.make_runner(piecewise_graphs=True)
    runner.warm_up(lambda _: None)
    first = runner.launch(mixed(2, 9))
    again = [Scheduled(item.request, 51 + place, 1, True) for place, item in enumerate(mixed(2).scheduled)]
    fake_gpu.seen.clear()
    second = runner.launch(StepPlan((*again, *mixed(0, 5).scheduled), 2), first)
    assert (fake_gpu.seen.replays, fake_gpu.seen.uploads, fake_gpu.seen.waits) == (3, 1, 0)
    assert [len(step.result().token_ids) for step in (first, second)] == [3, 3]
