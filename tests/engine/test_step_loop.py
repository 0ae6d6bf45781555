"""Async scheduling gives the same tokens as steps in turn, whatever is sampled, aborted or preempted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, SamplingParams, step_loop
from kvscope_engine.model.layers.sampling.sampler import Sampler
from kvscope_engine.policy.scheduling.planned_progress import FAIRNESS, PROMPT_IN_PROGRESS, SHARED_PROMPT
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_engine.step_loop import MAX_CONSECUTIVE_FAILED_STEPS
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror

Make = Callable[..., Engine]
Said = tuple[list[int], str]

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "stop_token_ids": tuple(range(3, 40))},
    {"temperature": 1.0, "stop_token_ids": tuple(range(3, 90)), "min_tokens": 4, "top_k": 20},
    {"temperature": 0.0, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.8, "n": 3},
)


def jobs_of(count: int) -> list[Submit]:
    """Return jobs of which every third begins with the same tokens."""
    generator = random.Random(count)
    shared = tuple(generator.choices(range(3, 256), k=11))
    jobs = []
    for number in range(count):
        own = tuple(generator.choices(range(3, 256), k=generator.randint(1, 25)))
        options = KINDS[number % len(KINDS)]
        sampling = SamplingParams(seed=number, max_tokens=generator.randint(4, 14), ignore_eos=True, **options)
        ids = (shared if number % 3 == 0 else ()) + own
        jobs.append(Submit(request_id="-", prompt_token_ids=ids, sampling=sampling))
    return jobs


def generated(engine: Engine, jobs: list[Submit]) -> list[tuple[list[int], str | None, Any]]:
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in engine.generate(jobs)]


@pytest.fixture(scope="module")
def jobs() -> list[Submit]:
    return jobs_of(21)


@pytest.fixture(scope="module")
def expected(make_small: Make, jobs: list[Submit]) -> list[tuple[list[int], str | None, Any]]:
    """The output of steps in turn, with room for all."""
    with make_small(num_gpu_blocks_override=2048, max_num_seqs=32) as engine:
        said = generated(engine, jobs)
        assert engine.overlaps.overlapped == 0
    assert {reason for _, reason, _ in said} == {"length", "stop"}
    return said


def close_to(said: list[tuple[list[int], str | None, Any]]) -> list[tuple[list[int], str | None, Any]]:
    """Return the output with log probabilities that match approximately: other batches differ in their last bits."""
    return [
        (ids, reason, [(one.token_id, pytest.approx(one.logprob, abs=1e-3)) for one in p]) for ids, reason, p in said
    ]


def numbers(said: list[tuple[list[int], str | None, Any]]) -> list[tuple[list[int], str | None, Any]]:
    """Return the output in the form of `close_to`."""
    return [(ids, reason, [(one.token_id, one.logprob) for one in logprobs]) for ids, reason, logprobs in said]


ROOMS: dict[str, dict[str, Any]] = {
    "room for all": {"num_gpu_blocks_override": 2048, "max_num_seqs": 32},
    "alone": {"max_num_seqs": 1},
    "chunks, too few blocks": {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 9, "max_num_seqs": 6},
    "swaps": {"num_gpu_blocks_override": 24, "preemption": "swap", "host_kv_memory_bytes": 1 << 20},
    "no prefix cache": {"enable_prefix_caching": False},
    "virtual": {"allocator": "virtual", "enable_prefix_caching": False},
}


@pytest.mark.parametrize("room", ROOMS)
def test_tokens_equal_those_of_steps_in_turn(
    make_engine: Make, jobs: list[Submit], expected: list[Any], room: str
) -> None:
    engine = make_engine(async_scheduling=True, **ROOMS[room])
    assert numbers(generated(engine, jobs)) == close_to(expected)
    engine.components.scheduler.check_integrity()
    counts = engine.overlaps
    if room == "virtual":
        assert (counts.overlapped, set(counts.blockers)) == (0, {"an allocator that reserves"})
    else:
        assert counts.overlapped > 0
        assert not any("form" in reason or "penalties" in reason for reason in counts.blockers)


class RandomLoad:
    """Submits, aborts, preempts, pauses and steps at random; after every step the mirror must equal the ledger."""

    def __init__(self, make_engine: Make, jobs: list[Submit], seed: int) -> None:
        self.frames: list[Frame] = []
        options = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 24, "max_num_seqs": 6}
        self.engine = make_engine(async_scheduling=True, publish=self._take, **options)
        self.jobs = jobs
        self.random = random.Random(seed)
        self.said: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.job_of: dict[str, int] = {}
        self.mirror = Mirror()
        self.mirror.reset(self.engine.snapshot())

    def _take(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            self.frames.append(message)

    def run(self, num_actions: int) -> None:
        for action in range(num_actions):
            dice = self.random.random()
            if dice < 0.35:
                self.submit(f"r{action}")
            elif dice < 0.45 and self.job_of:
                self.engine.abort(self.random.choice(list(self.job_of)))
            elif dice < 0.55:
                self.preempt()
            elif dice < 0.6:
                self.engine.reset_prefix_cache()
            elif dice < 0.65:
                self.hear(self.engine.finish_in_flight())
            else:
                self.hear(self.engine.step(ahead=dice < 0.95))
            self.check()
        while self.engine.has_unfinished:
            self.hear(self.engine.step())
            self.check()

    def submit(self, name: str) -> None:
        index = self.random.randrange(len(self.jobs))
        job = self.jobs[index]
        self.engine.submit(Submit(request_id=name, prompt_token_ids=job.prompt_token_ids, sampling=job.sampling))
        self.job_of[name] = index

    def preempt(self) -> None:
        running = [n for n, r in self.engine.components.scheduler.requests.items() if r.block_table]
        if running:
            with suppress(BadInput):  # it ended with the step in flight
                self.engine.interventions.preempt(self.random.choice(running), "", "ann")

    def hear(self, outputs: list[Tokens | Finished]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            if isinstance(output, Tokens):
                self.said.setdefault(key, []).extend(output.token_ids)
            else:
                assert key not in self.reasons, "the last word is said once"
                self.reasons[key] = output.finish_reason

    def check(self) -> None:
        self.engine.components.scheduler.check_integrity()
        snapshot: Snapshot = self.engine.snapshot()
        if self.frames:
            self.mirror.apply(coalesce(self.frames))
        self.frames.clear()
        ledger = self.engine.components.pool.ledger
        for name in ("state", "ref_count", "filled", "owner", "hash", "last_used_step"):
            assert (getattr(self.mirror.ledger, name) == getattr(ledger, name)).all(), name
        assert ledger.last_used_step.max() <= max(snapshot.step, 1), "nothing is dated after the step that tells of it"


@pytest.mark.storm({"seed": 1}, {"seed": 2})
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_async_scheduling_under_random_load_gives_the_same_tokens(
    make_engine: Make, jobs: list[Submit], expected: list[Any], seed: int, storm: Callable[[int, int], int]
) -> None:
    run = RandomLoad(make_engine, jobs, seed)
    run.run(storm(150, 500))
    completions = iter(expected)
    wanted = [[next(completions) for _ in range(job.sampling.n)] for job in jobs]
    for (name, index), reason in run.reasons.items():
        tokens, end, _ = wanted[run.job_of[name]][index]
        said = run.said.get((name, index), [])
        if reason == "abort":
            assert said == tokens[: len(said)]
        else:
            assert (said, reason) == (tokens, end)
    assert set(run.reasons) == {(name, i) for name, job in run.job_of.items() for i in range(jobs[job].sampling.n)}
    counts = run.engine.overlaps
    assert counts.overlapped > 5, "prompts, forms and forks keep most of a storm's steps apart"
    assert counts.blockers[FAIRNESS] * 10 < counts.steps, "the turns of clients prevented overlaps"
    assert run.engine.step_count == counts.steps
    snapshot = run.engine.snapshot()
    assert not any(snapshot.blocks.ref_count)


def submit(engine: Engine, name: str, **options: Any) -> None:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | options))
    engine.submit(Submit(request_id=name, prompt_token_ids=(5, 6, 7), sampling=sampling))


def tokens_of(outputs: list[Tokens | Finished]) -> list[int]:
    return [token for output in outputs if isinstance(output, Tokens) for token in output.token_ids]


def run_until_done(engine: Engine) -> Iterator[Tokens | Finished]:
    while engine.has_unfinished:
        yield from engine.step()


def test_step_whose_requests_have_all_ended_is_not_waited_for(make_engine: Make) -> None:
    """The next step takes its number, and no frame is published for it."""
    frames: list[Frame] = []
    engine = make_engine(
        async_scheduling=True, publish=lambda said: frames.append(said) if isinstance(said, Frame) else None
    )
    submit(engine, "a")
    engine.step()
    engine.abort("a")
    assert not tokens_of(engine.step())
    submit(engine, "b", max_tokens=3)
    assert len(tokens_of(list(run_until_done(engine)))) == 3
    assert engine.overlaps.void == 1
    assert engine.step_count == engine.overlaps.steps == 4
    assert [frame.step for frame in frames if frame.batch.number] == [1, 2, 3, 4]


def test_async_scheduling_starts_no_step_after_the_last_token_of_a_request(make_engine: Make) -> None:
    engine = make_engine(async_scheduling=True)
    submit(engine, "a", max_tokens=4)
    list(run_until_done(engine))
    assert (engine.overlaps.steps, engine.overlaps.overlapped, engine.overlaps.void) == (4, 3, 0)


def test_finishing_the_step_in_flight_returns_its_tokens_and_leaves_none_in_flight(make_engine: Make) -> None:
    engine = make_engine(async_scheduling=True)
    submit(engine, "a")
    assert len(tokens_of(engine.step())) == 1
    assert len(tokens_of(engine.finish_in_flight())) == 1, "the step begun ahead gave no token"
    assert engine.finish_in_flight() == []
    assert len(tokens_of(engine.step(ahead=False))) == 1
    assert engine.finish_in_flight() == []
    assert engine.step_count == 3


@pytest.mark.storm({"failures": (2,)}, {"failures": (1, 2)}, {"failures": (4, 6)})
@pytest.mark.parametrize("failures", [(1,), (2,), (1, 2), (2, 3), (4, 6)])
def test_step_that_cannot_be_launched_without_memory_runs_after_the_one_before(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, failures: tuple[int, ...]
) -> None:
    """The n-th launches fail, but tokens are the same and no request ends."""
    engine = make_engine(async_scheduling=True)
    submit(engine, "a")
    wanted = tokens_of(list(run_until_done(engine)))
    runner, calls = engine.components.runner, iter(range(1, 1000))
    launch = runner.launch

    def fails(plan: Any, after: Any = None) -> Any:
        if next(calls) in failures:
            raise torch.OutOfMemoryError("out of memory")
        return launch(plan, after)

    monkeypatch.setattr(runner, "launch", fails)
    submit(engine, "b")
    assert tokens_of(list(run_until_done(engine))) == wanted
    engine.components.scheduler.check_integrity()


@pytest.mark.parametrize("failures", [(2,), (3, 4, 6)])
def test_step_without_memory_for_its_late_samples_is_run_again(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, failures: tuple[int, ...]
) -> None:
    """The requests have penalties, which are applied after the step before is committed."""
    engine, options = make_engine(async_scheduling=True), {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
    submit(engine, "a", **options)
    wanted = tokens_of(list(run_until_done(engine)))
    inputs, calls = Sampler.inputs, iter(range(1, 1000))

    def fails(*args: Any) -> Any:
        if next(calls) in failures:
            raise torch.OutOfMemoryError("out of memory")
        return inputs(*args)

    monkeypatch.setattr(Sampler, "inputs", fails)
    overlapped = engine.overlaps.overlapped
    submit(engine, "b", **options)
    assert tokens_of(list(run_until_done(engine))) == wanted
    assert engine.overlaps.overlapped > overlapped
    engine.components.scheduler.check_integrity()


class LateForm:
    """A form that matches every text, with masks that come when the test says so."""

    is_ready = True
    has_ended = False

    def fill(self, words: Any, row: int, *, may_end: bool) -> None:
        words[row] = -1

    def accept(self, token_id: int) -> None:
        assert self.is_ready, "a token was accepted without its mask"


@pytest.mark.parametrize("seed", [0, 1])
def test_late_mask_delays_only_its_own_request(make_engine: Make, seed: int) -> None:
    """Alone and in a batch, the request gets the same tokens, only later. Tokens of other requests are not delayed."""
    chance = random.Random(seed)
    engine = make_engine(async_scheduling=True, num_gpu_blocks_override=40)
    for num_others in (0, 3):
        names = [f"r{number}" for number in range(num_others)]
        said: dict[str, list[int]] = {name: [] for name in ("formed", *names)}
        matcher = LateForm()
        for name in said:
            submit(engine, name, max_tokens=14, frequency_penalty=1.5)
        (formed, *_) = engine.components.scheduler.requests.values()
        formed.matcher = matcher
        while engine.has_unfinished:
            matcher.is_ready = chance.random() < 0.5
            for output in engine.step():
                if isinstance(output, Tokens):
                    said[output.request_id] += output.token_ids
            engine.components.scheduler.check_integrity()
        assert len({tuple(tokens) for tokens in said.values()}) == 1, "the prompts and options are alike"
        assert {len(tokens) for tokens in said.values()} == {14}
    assert engine.overlaps.overlapped > 14
    assert engine.overlaps.void > 0, "no step of the request alone was void"
    assert not any(engine.snapshot().blocks.ref_count)


@pytest.mark.parametrize("num_others", [0, 2], ids=["alone", "beside others"])
@pytest.mark.parametrize("where", ["launch", "inputs"])
def test_request_without_its_mask_skips_a_step_that_is_run_again(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, num_others: int, where: str
) -> None:
    """The step had no memory when it was begun, or for its samples: no request ends, and the tokens are the same."""
    chance, calls = random.Random(num_others), iter(range(1, 1000))
    engine, matcher, said = make_engine(async_scheduling=True), LateForm(), dict[str, list[int]]()
    owner: Any = engine.components.runner if where == "launch" else Sampler
    call = getattr(owner, where)

    def every_third_fails(*args: Any) -> Any:
        if next(calls) % 3 == 0:
            raise torch.OutOfMemoryError("out of memory")
        return call(*args)

    for is_broken in (False, True):
        said.clear()
        if is_broken:
            monkeypatch.setattr(owner, where, every_third_fails)
        for name in ("formed", *(f"r{number}" for number in range(num_others))):
            said[name] = []
            submit(engine, name, max_tokens=14, frequency_penalty=1.5)
        (formed, *_) = engine.components.scheduler.requests.values()
        formed.matcher = matcher
        while engine.has_unfinished:
            matcher.is_ready = chance.random() < 0.5
            for output in engine.step():
                if isinstance(output, Tokens):
                    said[output.request_id] += output.token_ids
                else:
                    assert output.finish_reason == "length", output.error
            engine.components.scheduler.check_integrity()
        assert {len(tokens) for tokens in said.values()} == {14}
        assert len({tuple(tokens) for tokens in said.values()}) == 1, "the prompts and options are alike"


def test_failed_launch_leaves_requests_that_can_be_aborted(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(async_scheduling=True)
    submit(engine, "a")
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.components.runner, "launch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.components.scheduler.check_integrity()
    engine.abort("a")
    assert [output.finish_reason for output in run_until_done(engine) if isinstance(output, Finished)] == ["abort"]
    assert not any(engine.snapshot().blocks.ref_count)


def test_delayed_step_is_begun_before_the_last_one_is_recorded(make_engine: Make) -> None:
    """Completions share their prompt: the frame of the step that computes it has the blocks of the next step."""
    begun = []

    def hear(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            begun.append(engine.overlaps.launched_early)

    engine = make_engine(async_scheduling=True, publish=hear)
    submit(engine, "a", n=3, temperature=1.0, seed=1)
    engine.step(ahead=False)
    assert begun == [0], "only where the next step may begin"
    submit(engine, "b", n=3, temperature=1.0, seed=1)
    list(run_until_done(engine))
    counts = engine.overlaps
    assert 0 < counts.launched_early == counts.blockers[SHARED_PROMPT] + counts.blockers[PROMPT_IN_PROGRESS]
    assert counts.launched_early + counts.overlapped <= counts.steps
    assert set(begun) == set(range(counts.launched_early + 1)), "a frame was published before the next step was begun"
    assert "launched before the previous one was recorded" in counts.summary()


def test_host_time_that_overlaps_a_running_step_is_counted(make_engine: Make) -> None:
    for overlaps in (True, False):
        engine = make_engine(async_scheduling=overlaps)
        submit(engine, "a")
        list(run_until_done(engine))
        assert (engine.overlaps.overlap_ns > 0) == overlaps


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "a step ahead"])
def test_steps_are_planned_smaller_for_a_while_after_a_shortage(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, jobs: list[Submit], overlaps: bool
) -> None:
    """One step fails and is split, later ones are planned to fit; both changes are reported, and tokens are
    the same.
    """
    engine = make_engine(async_scheduling=overlaps, max_num_batched_tokens=64)
    wanted, scheduler, runner = generated(engine, jobs), engine.components.scheduler, engine.components.runner
    limits, launch, failed = (
        (scheduler.limits.max_num_batched_tokens, scheduler.limits.max_num_seqs),
        runner.launch,
        list[int](),
    )

    def small(plan: StepPlan, after: Any = None) -> Any:
        if plan.num_tokens > 9:
            failed.append(plan.num_tokens)
            raise torch.OutOfMemoryError("out of memory")
        return launch(plan, after)

    with monkeypatch.context() as short:
        short.setattr(runner, "launch", small)
        assert numbers(generated(engine, jobs)) == close_to(wanted)
        assert scheduler.limits.max_step_tokens <= 9
        reduced = f"{scheduler.limits.max_step_tokens} tokens of {scheduler.limits.max_step_requests} requests"
        assert engine.notes == (f"a step ran out of memory: steps have up to {reduced} for now",)
        assert len(failed) < 16, "the tries and parts of a step, and of the one that was begun behind it"
    later_ns = time.monotonic_ns() + 60_000_000_000
    monkeypatch.setattr(step_loop.time, "monotonic_ns", lambda: later_ns)
    assert not engine.while_idle()
    assert engine.notes[1:] == (f"steps have up to {limits[0]} tokens of {limits[1]} requests again",)
    assert (scheduler.limits.max_step_tokens, scheduler.limits.max_step_requests) == limits


POISON = (200, 201, 202, 203) * 6


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "a step ahead"])
def test_only_the_request_that_makes_a_library_fail_ends(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, jobs: list[Submit], overlaps: bool
) -> None:
    """The failed request's blocks are not found in the prefix cache, because their contents were not written."""
    engine = make_engine(async_scheduling=overlaps, num_gpu_blocks_override=256)
    launch, runner = engine.components.runner.launch, engine.components.runner
    wanted = generated(engine, jobs)
    poison = Submit(request_id="-", prompt_token_ids=POISON, sampling=SamplingParams(temperature=0.0, max_tokens=9))

    def picky(plan: StepPlan, after: Any = None) -> Any:
        launched = launch(plan, after)
        if any(tuple(item.request.prompt_token_ids) == POISON for item in plan.scheduled):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        return launched

    with monkeypatch.context() as broken:
        broken.setattr(runner, "launch", picky)
        *others, bad = engine.generate([*jobs, poison])
        said = [(one.token_ids, one.finish_reason, one.logprobs) for one in others]
        assert numbers(said) == close_to(wanted)
        assert (bad.finish_reason, bad.token_ids) == ("error", [])
        assert "CUBLAS_STATUS_EXECUTION_FAILED" in bad.error
    assert engine.notes == ("a step failed and 1 of its requests ended: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",)
    cached = engine.components.scheduler.totals.cached_tokens
    (again,) = engine.generate([poison])
    assert again.finish_reason != "error"
    assert engine.components.scheduler.totals.cached_tokens == cached
    with make_engine(num_gpu_blocks_override=256) as fresh:
        assert [one.token_ids for one in fresh.generate([poison])] == [again.token_ids]
    assert not any(engine.snapshot().blocks.ref_count)


def test_lost_device_ends_the_engine_with_its_reason(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal address CUDA refuses everything, even the copy that checks the device."""
    engine = make_engine()
    ones, launch = torch.ones, engine.components.runner.launch
    assert engine.components.runner.is_device_usable()

    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def short(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 B")

    monkeypatch.setattr(torch, "ones", short)
    assert engine.components.runner.is_device_usable(), "memory can be given back"
    submit(engine, "a")
    monkeypatch.setattr(engine.components.runner, "launch", lost)
    monkeypatch.setattr(torch, "ones", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(engine.components.runner, "launch", launch)


def test_engine_ends_if_no_step_can_run_any_more(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that fails in every step is not the fault of the requests."""
    engine = make_engine(max_num_seqs=1)

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(engine.components.runner, "launch", broken)
    for number in range(MAX_CONSECUTIVE_FAILED_STEPS + 3):
        submit(engine, f"r{number}")
    outputs: list[Tokens | Finished] = []
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED"):
        outputs.extend(run_until_done(engine))
    assert [one.finish_reason for one in outputs if isinstance(one, Finished)] == ["error"] * (
        MAX_CONSECUTIVE_FAILED_STEPS - 1
    )
    engine.components.scheduler.check_integrity()


@pytest.mark.parametrize("overlaps", [False, True], ids=["turns", "overlapped"])
def test_invalid_requests_among_good_ones_do_not_end_the_engine(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    """Only a row of steps in which nothing runs does."""
    engine = make_engine(async_scheduling=overlaps)
    runner, launch = engine.components.runner, engine.components.runner.launch

    def picky(plan: StepPlan, after: Any = None) -> Any:
        if any(tuple(item.request.prompt_token_ids) == POISON for item in plan.scheduled):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        return launch(plan, after)

    monkeypatch.setattr(runner, "launch", picky)
    poison = Submit(request_id="-", prompt_token_ids=POISON, sampling=SamplingParams(temperature=0.0, max_tokens=9))
    for number in range(MAX_CONSECUTIVE_FAILED_STEPS + 2):
        (bad,) = engine.generate([poison])
        assert bad.finish_reason == "error"
        submit(engine, f"good {number}", max_tokens=3)
        assert len(tokens_of(list(run_until_done(engine)))) == 3
    assert len(engine.notes) == 1, "the other failures are not combined in a later notice"


def test_failures_of_steps_begun_ahead_are_reported(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(async_scheduling=True)
    runner, launch = engine.components.runner, engine.components.runner.launch

    def fails_ahead(plan: StepPlan, after: Any = None) -> Any:
        if after is not None:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        return launch(plan, after)

    monkeypatch.setattr(runner, "launch", fails_ahead)
    submit(engine, "a", max_tokens=20)
    assert len(tokens_of(list(run_until_done(engine)))) == 20
    assert engine.notes == ("a step failed and was run again: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",)


@pytest.mark.storm({"num_blocks": 30}, {"num_blocks": 36})
@pytest.mark.parametrize(("num_blocks", "seed"), [(24, 2), (30, 1), (36, 1)])
def test_copies_of_a_failed_step_are_not_repeated(
    make_small: Make, make_engine: Make, monkeypatch: pytest.MonkeyPatch, num_blocks: int, seed: int
) -> None:
    """The source block may belong to another request by then, which wrote it in the first try."""
    draw = random.Random(seed)
    asked = [
        Submit(
            request_id="-",
            prompt_token_ids=tuple(draw.choices(range(3, 256), k=draw.randint(3, 22))),
            sampling=SamplingParams(
                seed=number, temperature=0.8, n=3 if number % 2 else 1, max_tokens=draw.randint(8, 20), ignore_eos=True
            ),
        )
        for number in range(16)
    ]
    with make_small(num_gpu_blocks_override=2048, max_num_seqs=64) as calm:
        wanted = generated(calm, asked)
    engine = make_engine(num_gpu_blocks_override=num_blocks, max_num_seqs=12, async_scheduling=False)
    runner, launch = engine.components.runner, engine.components.runner.launch
    tries = 0

    def every_second_fails_late(plan: StepPlan, after: Any = None) -> Any:
        nonlocal tries
        tries += 1
        launched = launch(plan, after)
        if tries % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launched

    monkeypatch.setattr(runner, "launch", every_second_fails_late)
    said = generated(engine, asked)
    assert engine.components.scheduler.totals.copied_blocks > 0
    assert [tokens for tokens, *_ in said] == [tokens for tokens, *_ in wanted]
    engine.components.scheduler.check_integrity()
