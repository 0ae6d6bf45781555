"""Real engines whose requests are often in host memory and on disk: the tokens and bytes stay the same."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import STORMS

from kvscope_engine import Engine, SamplingParams
from kvscope_engine.model.kv_cache.kv_offload import tier_builder
from kvscope_engine.model.kv_cache.kv_offload.block_copies import HostBlockCopier
from kvscope_engine.model.kv_cache.kv_offload.staged_copies import StagedBlockCopier
from kvscope_engine.model.layers.fused.int8_linear import can_round
from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror

Make = Callable[..., Engine]
Said = dict[int, list[int]]
"""Tokens of each completion."""
RECORD = 4096
"""A block of the tiny model takes one sector on disk."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folder for temporary files of the disk tier."""
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))


def tier_options(engine_block_bytes: int, num_host: int, num_disk: int, **more: Any) -> dict[str, Any]:
    """Return options for this many slots in host memory and on disk."""
    sizes = {"host_kv_memory_bytes": num_host * engine_block_bytes, "disk_kv_memory_bytes": num_disk * RECORD}
    return {"preemption": "swap"} | sizes | more


def make_jobs(count: int, seed: int) -> list[Submit]:
    """Return jobs of one to three completions, greedy and seeded; half begin alike, every fourth ends with a full
    block.
    """
    draw = random.Random(seed)
    prefix = draw.choices(range(3, 256), k=20)
    jobs = []
    for number in range(count):
        own = draw.choices(range(3, 256), k=draw.randint(1, 24) if number % 4 else 4 * draw.randint(1, 5))
        sampling = SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            top_k=4,  # few thresholds that a rounding error could cross
            n=draw.choice((1, 1, 2, 3)),
            max_tokens=draw.choice((1, draw.randint(2, 12), draw.randint(20, 40))),
            ignore_eos=True,
        )
        ids = tuple((prefix if draw.random() < 0.5 else []) + own)
        jobs.append(Submit(request_id="-", prompt_token_ids=ids, sampling=sampling))
    return jobs


def run_alone(engine: Engine, job: Submit) -> Said:
    engine.submit(job)
    said: Said = {}
    while engine.has_unfinished:
        for message in engine.step():
            if isinstance(message, Tokens):
                said.setdefault(message.index, []).extend(message.token_ids)
    return said


@dataclass
class CheckedMirror:
    """A mirror that receives every frame and must equal the ledger and the tables after each."""

    frames: list[Frame] = field(default_factory=list)
    mirror: Mirror = field(default_factory=Mirror)
    causes: list[str] = field(default_factory=list)

    def receive(self, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            self.frames.append(message)

    def check(self, engine: Engine) -> None:
        if not self.mirror.epoch:
            self.mirror.apply(coalesce((), snapshot=engine.snapshot()))
            self.frames.clear()
        for frame in self.frames:
            self.causes += [event.cause for event in frame.events]
        frames, self.frames = self.frames, []
        if frames:
            self.mirror.apply(coalesce(frames))
        scheduler = engine.components.scheduler
        assert self.mirror.ledger.differences(engine.components.pool.ledger) == []
        for number, request in scheduler.requests.items():
            table = self.mirror.requests.table(number).tolist()
            assert table == (request.saved_rows or request.block_table)
            assert not (request.saved_rows and request.block_table)


class RandomLoad:
    """Submits, aborts and resets at random between the steps of one engine."""

    def __init__(
        self, engine: Engine, watched: CheckedMirror, jobs: list[Submit], expected: list[Said], seed: int
    ) -> None:
        self.engine, self.watched = engine, watched
        self.jobs, self.expected = jobs, expected
        self.random = random.Random(seed)
        self.alive: dict[str, int] = {}
        self.said: dict[tuple[str, int], list[int]] = {}
        self.aborted: set[str] = set()
        self.num_whole = 0
        self.num_submitted = 0
        self.before_step: Callable[[], None] = lambda: None

    def run(self, num_actions: int) -> None:
        for action in range(num_actions):
            if self.alive and self.random.random() < 0.15:
                name = self.random.choice(list(self.alive))
                self.engine.abort(name)
                self.aborted.add(name)
            elif len(self.alive) < 12:
                self.submit(f"r{action}")
            if self.random.random() < 0.02:
                self.engine.reset_prefix_cache()
            for _ in range(self.random.choice((0, 1, 2, 5))):
                self.step()
        steps = 0
        while self.engine.has_unfinished:
            self.step()
            steps += 1
            assert steps < 20_000, f"{len(self.alive)} requests never end"
        assert not self.alive

    def submit(self, name: str) -> None:
        index = self.random.randrange(len(self.jobs))
        job = self.jobs[index]
        priority = self.random.choice((0, 0, 0, 5, -5))
        ids, sampling = job.prompt_token_ids, job.sampling
        self.engine.submit(Submit(request_id=name, prompt_token_ids=ids, sampling=sampling, priority=priority))
        self.alive[name] = index
        self.said |= {(name, completion): [] for completion in range(sampling.n)}

    def step(self) -> None:
        self.before_step()
        for message in self.engine.step():
            if isinstance(message, Tokens):
                self.said[message.request_id, message.index] += message.token_ids
            else:
                self.end(message)
        self.engine.components.scheduler.check_integrity()
        self.watched.check(self.engine)

    def end(self, last: Finished) -> None:
        name = last.request_id
        said = self.said.pop((name, last.index))
        expected = self.expected[self.alive[name]][last.index]
        assert said == expected[: len(said)], "whatever ended it, it was right up to there"
        if name not in self.aborted:
            assert last.finish_reason == "length"
            assert said == expected
            self.num_whole += 1
        if not any((name, completion) in self.said for completion in range(3)):
            del self.alive[name]


VARIANTS: Mapping[str, dict[str, Any]] = {
    "host memory for a few blocks, all else to disk": tier_options(2048, 6, 400),
    "as measured": tier_options(2048, 30, 100, preemption="auto"),
    "evicted prefixes alone": tier_options(2048, 12, 60, preemption="recompute"),
    "without prefix caching": tier_options(2048, 6, 400, enable_prefix_caching=False),
    "disk for a few blocks too": tier_options(2048, 5, 9),
    "host memory alone": tier_options(2048, 40, 0),
    "int8": tier_options(640, 6, 400, kv_cache_dtype="int8"),
    "fp8": tier_options(640, 6, 400, kv_cache_dtype="fp8"),
    "blocks of one token": tier_options(512, 16, 900, block_size=1, num_gpu_blocks_override=110),
    "contiguous": {"allocator": "contiguous", "enable_prefix_caching": False, "max_model_len": 128},
    "buddy": {"allocator": "buddy", "enable_prefix_caching": False},
    "virtual": {"allocator": "virtual", "enable_prefix_caching": False},
}
PLAINER = (
    "without prefix caching",
    "host memory alone",
    "int8",
    "fp8",
    "blocks of one token",
    "buddy",
    "contiguous",
    "evicted prefixes alone",
)
"""Variants that others include, or `test_block_has_the_same_bytes_after_a_swap`."""


@pytest.fixture(scope="module")
def jobs() -> list[Submit]:
    return make_jobs(24, 7)


@pytest.fixture(scope="module")
def expected_of() -> dict[str, list[Said]]:
    """The tokens of the jobs alone, by dtype of the cache."""
    return {}


@pytest.mark.storm(*({"variant": variant} for variant in PLAINER))
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_load_over_all_tiers_gives_the_same_tokens(
    make_engine: Make, jobs: list[Submit], expected_of: dict[str, list[Said]], variant: str
) -> None:
    options = VARIANTS[variant]
    dtype = options.get("kv_cache_dtype", "auto")
    if dtype not in expected_of:
        alone = make_engine(max_num_seqs=3, enable_prefix_caching=False, kv_cache_dtype=dtype)
        expected_of[dtype] = [run_alone(alone, job) for job in jobs]
    watched = CheckedMirror()
    small = {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    engine = make_engine(publish=watched.receive, **(small | options))
    storm = RandomLoad(engine, watched, jobs, expected_of[dtype], seed=len(variant))
    storm.run(100 if STORMS else 25)
    while not_yet := [what for what in unreached_conditions(storm, engine, variant) if what]:
        assert storm.num_submitted < 3000, not_yet
        storm.run(10)  # a busy disk accepts fewer blocks at a time
    assert engine.snapshot().counters.lost_blocks == 0
    engine.reset_prefix_cache()
    unmapped = {BlockState.UNMAPPED} if options.get("allocator") == "virtual" else set()
    assert set(engine.snapshot().blocks.state) - unmapped == {BlockState.FREE}


def unreached_conditions(storm: RandomLoad, engine: Engine, variant: str) -> Iterator[str]:
    """Yield what the variant is for and did not happen yet."""
    options, counters = VARIANTS[variant], engine.snapshot().counters
    enough = 2 if STORMS else 1
    yield "whole requests" * (storm.num_whole <= 15 * enough)
    yield "aborts" * (len(storm.aborted) <= 4 * enough)
    yield "preemptions" * (
        counters.preemptions <= 5 and variant != "contiguous"
    )  # which admits only requests that can finish
    if "preemption" not in options:
        return
    yield "loads" * (counters.loaded_blocks <= 20)
    yield "swaps" * (counters.swapped_blocks <= 10 and options["preemption"] == "swap")
    yield "offloading" * (counters.offloaded_blocks <= 20 and options.get("enable_prefix_caching", True))
    if options["disk_kv_memory_bytes"]:
        ledger = engine.components.pool.ledger
        yield "disk" * (not ledger.last_used_step[ledger.tier == Tier.DISK].any())


# Faults at run time: whatever happens to the file, the tokens are right and nothing stays allocated.


@pytest.fixture
def expected(make_engine: Make, jobs: list[Submit], expected_of: dict[str, list[Said]]) -> list[Said]:
    if "auto" not in expected_of:
        alone = make_engine(max_num_seqs=3, enable_prefix_caching=False)
        expected_of["auto"] = [run_alone(alone, job) for job in jobs]
    return expected_of["auto"]


def overwrite_with_garbage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(random.Random(1).randbytes(path.stat().st_size))


def replace_file(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(bytes(path.stat().st_size))
    new.rename(path)


FAULTS: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "garbage": (overwrite_with_garbage, ""),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), ""),
    "emptied": (lambda path: os.truncate(path, 0), ""),
    "deleted": (lambda path: path.unlink(missing_ok=True), "was removed or replaced"),
    "replaced": (replace_file, "was removed or replaced"),
}


@pytest.mark.storm({"copy_fault": "cut"}, {"copy_fault": "emptied"}, {"copy_fault": "replaced"})
@pytest.mark.parametrize("copy_fault", FAULTS)
def test_damaged_disk_file_changes_no_tokens(
    make_engine: Make, jobs: list[Submit], expected: list[Said], tmp_path: Path, copy_fault: str
) -> None:
    damage, reason = FAULTS[copy_fault]
    watched, path = CheckedMirror(), tmp_path / "tier"
    small = {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    named = {"disk_kv_path": str(path), "keep_disk_kv": True}
    engine = make_engine(publish=watched.receive, **(small | tier_options(2048, 6, 400) | named))
    storm = RandomLoad(engine, watched, jobs, expected, seed=len(copy_fault))
    steps = iter(range(10_000))

    def sometimes() -> None:
        if next(steps) % 20 == 19 and path.exists():
            assert engine.components.mover is not None
            engine.components.mover.drain()
            damage(path)

    storm.before_step = sometimes
    storm.run(80)
    assert storm.num_whole > 10
    if not reason:  # a removed or replaced file refuses the next write: only blocks that are being written can be lost
        assert engine.snapshot().counters.lost_blocks > 0
    check_reported_once(engine, watched, reason)


def test_full_disk_changes_no_tokens(
    make_engine: Make, jobs: list[Submit], expected: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = os.pwritev, [40]

    def full(fd: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    watched = CheckedMirror()
    small = {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    engine = make_engine(publish=watched.receive, **(small | tier_options(2048, 6, 400)))
    storm = RandomLoad(engine, watched, jobs, expected, seed=3)
    storm.run(80)
    assert storm.num_whole > 10
    check_reported_once(engine, watched, "No space left on device")


def check_reported_once(engine: Engine, watched: CheckedMirror, reason: str) -> None:
    """Check that an event and, at the end, a notice say why the tier is off, and that every slot was freed."""
    causes = [cause for cause in watched.causes if "the disk tier is off" in cause]
    assert [reason in cause for cause in causes] == ([True] if reason else [])
    engine.reset_prefix_cache()
    assert set(engine.snapshot().blocks.state) == {BlockState.FREE}
    engine.close()
    assert bool(reason) == any(reason in note for note in engine.notes if reason), engine.notes


# The bytes


def block_contents(engine: Engine, blocks: list[int]) -> list[bytes]:
    tensors = engine.components.storage.block_tensors
    rows = [[tensor[block].contiguous().view(-1).view(torch.uint8) for tensor in tensors] for block in blocks]
    return [torch.cat(row).numpy().tobytes() for row in rows]


class SwapChecker:
    """Compares the contents of the blocks of every request before it is swapped out and after it is swapped in."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.run = engine.components.runner.run
        self.before: dict[int, list[bytes]] = {}
        self.saved: dict[int, list[bytes]] = {}
        self.tiers: set[int] = set()
        self.num_back = 0

    def record_contents(self) -> None:
        """Record the contents before the step is planned."""
        requests = self.engine.components.scheduler.requests
        self.before = {number: block_contents(self.engine, request.block_table) for number, request in requests.items()}

    def check_and_run(self, plan: StepPlan) -> StepResult:
        """Compare the contents after the step was planned, before anything is written."""
        for number, request in self.engine.components.scheduler.requests.items():
            if request.saved_rows:
                self.saved.setdefault(number, self.before[number])
                self.tiers |= set(self.engine.components.pool.ledger.tier[request.saved_rows].tolist())
            elif number in self.saved and request.block_table:
                was = self.saved.pop(number)
                assert block_contents(self.engine, request.block_table[: len(was)]) == was
                self.num_back += 1
        return self.run(plan)


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("through_disk", [False, True])
def test_block_has_the_same_bytes_after_a_swap(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, dtype: str, through_disk: bool
) -> None:
    block_bytes = 2048 if dtype == "auto" else 640
    engine = make_engine(
        num_gpu_blocks_override=24,
        enable_prefix_caching=False,
        kv_cache_dtype=dtype,
        **tier_options(block_bytes, 14 if through_disk else 60, 100),
    )
    journey = SwapChecker(engine)
    monkeypatch.setattr(engine.components.runner, "run", journey.check_and_run)
    for number in range(6):
        ids = tuple(random.Random(number).choices(range(3, 256), k=17))
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        engine.submit(Submit(request_id=str(number), prompt_token_ids=ids, sampling=sampling))
    while engine.has_unfinished:
        journey.record_contents()
        engine.step()
    assert journey.num_back >= 3
    assert journey.tiers == ({Tier.HOST, Tier.DISK} if through_disk else {Tier.HOST})


# Two engines run one after the other; the first one keeps its file.


def test_kept_disk_file_is_reused_by_an_engine_with_the_same_model(
    make_engine: Make, tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    path, model, other = tmp_path / "tier", tiny_model(), tiny_model(initializer_range=0.39)
    options = tier_options(
        2048, 4, 200, disk_kv_path=str(path), keep_disk_kv=True, model=model, num_gpu_blocks_override=30
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [tuple(random.Random(seed).choices(range(3, 256), k=70)) for seed in (1, 2)]

    def ask(**changes: Any) -> tuple[list[list[int]], int, str]:
        engine = make_engine(**(options | changes))
        asked = [Submit(request_id="-", prompt_token_ids=ids, sampling=sampling) for ids in prompts]
        completions = [next(engine.generate([submit])) for submit in asked]
        engine.close()
        return [one.token_ids for one in completions], completions[0].usage.cached_tokens, " ".join(engine.notes)

    tokens, cached, notes = ask()
    assert (cached, notes) == (0, "")
    assert ask() == (tokens, 68, ""), "all but the last token, as the first block of a text is kept with its last"
    others: list[dict[str, Any]] = [
        {"model": other},
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"kv_cache_dtype": "int8"},
    ]
    others += [{"quantization": "int8"}] if can_round() else []
    for changes in (change for one in others for change in (one, {})):
        found, cached, notes = ask(**changes)
        assert cached == 0
        assert found == tokens or changes
        assert notes == f"{str(path)!r} is used anew: its index is of another model or layout"
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    assert ask() == (tokens, 0, ""), "not one of its blocks is whole"
    index = tmp_path / "tier.index"
    index.write_bytes(index.read_bytes()[:-1])
    assert ask() == (tokens, 0, f"{str(path)!r} is used anew: its index is damaged")
    assert ask() == (tokens, 68, "")


# Copies fail.


LONG = tuple(random.Random(1).choices(range(3, 250), k=40))


@dataclass
class Fault:
    """Raised at the next mark of the copy streams once it is set, or at all marks from then on."""

    error: Exception | None = None
    lasts: bool = False

    def __call__(self) -> None:
        error = self.error
        if not self.lasts:
            self.error = None
        if error is not None:
            raise error


@pytest.fixture
def copy_fault(monkeypatch: pytest.MonkeyPatch, prompt_streams: Callable[..., Any]) -> Fault:
    """A fault in the GPU copies of engines that are made from here on."""
    copy_fault = Fault()
    monkeypatch.setattr(
        tier_builder,
        "HostBlockCopier",
        lambda words, rows: StagedBlockCopier(words, rows, prompt_streams(copy_fault), 64),
    )
    return copy_fault


def generate_tokens(engine: Engine, prompt: tuple[int, ...], *, num_steps: int | None = None) -> list[int]:
    """Return the output for a prompt after at most this many steps."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.submit(Submit(request_id="-", prompt_token_ids=prompt, sampling=sampling))
    said: list[int] = []
    while engine.has_unfinished and num_steps != 0:
        said += [token for one in engine.step() if isinstance(one, Tokens) for token in one.token_ids]
        num_steps = None if num_steps is None else num_steps - 1
    return said


def evictable_blocks(engine: Engine) -> list[int]:
    pool = engine.components.pool
    return [block for block in range(pool.num_blocks) if pool.is_evictable(block)]


def test_eviction_without_device_memory_loses_no_block(make_engine: Make, copy_fault: Fault) -> None:
    engine = make_engine(**tier_options(2048, 100, 0))
    expected = generate_tokens(engine, LONG)
    copy_fault.error = torch.OutOfMemoryError("CUDA out of memory")
    engine.interventions.evict(evictable_blocks(engine), "me")
    assert copy_fault.error is None, "no copy was attempted"
    engine.components.scheduler.check_integrity()
    assert generate_tokens(engine, LONG) == expected
    assert engine.components.scheduler.totals.loaded_blocks > 0


def test_request_swapped_out_without_device_memory_continues(make_engine: Make, copy_fault: Fault) -> None:
    engine = make_engine(enable_prefix_caching=False, **tier_options(2048, 100, 0))
    expected = generate_tokens(engine, LONG)
    said = generate_tokens(engine, LONG, num_steps=5)
    copy_fault.error = torch.OutOfMemoryError("CUDA out of memory")
    (number,) = engine.components.scheduler.requests
    engine.interventions.preempt(number, "swap", "me")
    assert copy_fault.error is None, "no copy was attempted"
    while engine.has_unfinished:
        said += [token for one in engine.step() if isinstance(one, Tokens) for token in one.token_ids]
    assert said == expected


@pytest.mark.parametrize("lasts", [False, True])
def test_disk_file_of_an_engine_with_failed_copies_is_not_reused(
    make_engine: Make, copy_fault: Fault, tmp_path: Path, lasts: bool
) -> None:
    options = tier_options(
        2048, 100, 400, disk_kv_path=str(tmp_path / "tier"), keep_disk_kv=True, num_gpu_blocks_override=24
    )
    engine = make_engine(**options)
    expected = generate_tokens(engine, LONG)
    copy_fault.error, copy_fault.lasts = RuntimeError("an illegal instruction was encountered"), lasts
    with pytest.raises(RuntimeError, match="illegal instruction"):
        generate_tokens(engine, tuple(random.Random(2).choices(range(3, 250), k=60)))
    assert "could not be copied between the tiers" in engine.failure
    engine.close()
    copy_fault.error = None
    after = make_engine(**options)
    assert generate_tokens(after, LONG) == expected
    assert after.components.scheduler.totals.loaded_blocks == 0


@pytest.mark.parametrize("command", ["evict", "preempt"])
def test_engine_with_failed_copies_in_a_command_runs_no_more(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def fails(*given: Any) -> None:
        raise MemoryError("no memory for the ids of blocks")

    engine = make_engine(**tier_options(2048, 100, 0))
    generate_tokens(engine, LONG)
    generate_tokens(engine, LONG[:20], num_steps=3)
    (number,) = engine.components.scheduler.requests
    does = engine.interventions
    do = {"evict": partial(does.evict, evictable_blocks(engine)), "preempt": partial(does.preempt, number, "swap")}
    monkeypatch.setattr(HostBlockCopier, "save", fails)
    with pytest.raises(MemoryError):
        do[command]("me")
    monkeypatch.undo()
    assert "no memory for the ids of blocks" in engine.failure
    with pytest.raises(EngineDead, match="could not be copied between the tiers"):
        engine.step()
