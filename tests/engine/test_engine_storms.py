"""A real engine under random load: completions equal those of requests alone, and the pool ends as it began."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pytest

from kvscope_engine import Engine, SamplingParams
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens

Make = Callable[..., Engine]


@dataclass(frozen=True)
class Job:
    """A prompt and its sampling options."""

    ids: tuple[int, ...]
    sampling: SamplingParams


def make_jobs(count: int, *, prompts: tuple[int, int], outputs: tuple[int, int], shared: int = 0) -> list[Job]:
    """Return jobs, half greedy and half seeded, with lengths between the bounds; every third begins with the same
    tokens.
    """
    generator = random.Random(count)
    prefix = generator.choices(range(3, 256), k=shared)
    jobs = []
    for number in range(count):
        own = generator.choices(range(3, 256), k=generator.randint(*prompts))
        sampling = SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            top_p=0.95 if number % 4 == 0 else 1.0,
            max_tokens=generator.randint(*outputs),
            ignore_eos=True,
        )
        jobs.append(Job(tuple((prefix if number % 3 == 0 else []) + own), sampling))
    return jobs


def run_all(engine: Engine, jobs: Iterable[Job]) -> list[list[int]]:
    """Return the tokens of each job, all submitted at once."""
    submits = [Submit(request_id="-", prompt_token_ids=job.ids, sampling=job.sampling) for job in jobs]
    completions = list(engine.generate(submits))
    assert {completion.finish_reason for completion in completions} == {"length"}
    return [completion.token_ids for completion in completions]


def check_consistency(engine: Engine) -> None:
    """Check the scheduler, and that free, cached, active and unmapped blocks make up the reported pool."""
    engine.components.scheduler.check_integrity()
    pool = engine.components.pool
    assert pool.num_free + pool.num_cached + pool.num_active + pool.num_unmapped == pool.num_blocks


def check_all_released(engine: Engine) -> None:
    """Check that nothing is active or counted, and that without the prefix cache every block is free."""
    check_consistency(engine)
    snapshot = engine.snapshot()
    assert BlockState.ACTIVE not in snapshot.blocks.state
    assert not any(snapshot.blocks.ref_count)
    engine.reset_prefix_cache()
    unmapped = {BlockState.UNMAPPED} if engine.hello.cache.allocator == "virtual" else set()
    assert set(engine.snapshot().blocks.state) - unmapped == {BlockState.FREE}
    check_consistency(engine)


class RandomLoad:
    """Submits and aborts at random between the steps of one engine."""

    def __init__(self, engine: Engine, jobs: list[Job], expected_tokens: list[list[int]], seed: int) -> None:
        self.engine = engine
        self.jobs, self.expected = jobs, expected_tokens
        self.random = random.Random(seed)
        self.alive: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.said: dict[str, list[int]] = {}
        self.num_whole = 0

    def run(self, num_actions: int) -> None:
        for action in range(num_actions):
            if self.alive and self.random.random() < 0.4:
                self.abort()
            else:
                self.submit(f"r{action}")
            if self.random.random() < 0.5:
                self.step()
        while self.engine.has_unfinished:
            self.step()
        assert not self.alive

    def submit(self, name: str) -> None:
        index = self.random.randrange(len(self.jobs))
        job = self.jobs[index]
        priority = self.random.choice((0, 0, 0, 5, -5))
        self.engine.submit(Submit(request_id=name, prompt_token_ids=job.ids, sampling=job.sampling, priority=priority))
        self.alive[name], self.said[name] = index, []

    def abort(self) -> None:
        name = self.random.choice(list(self.alive))
        self.engine.abort(name)
        self.aborted.add(name)

    def step(self) -> None:
        for message in self.engine.step():
            if isinstance(message, Tokens):
                self.said[message.request_id] += message.token_ids
            else:
                self.end(message)
        check_consistency(self.engine)

    def end(self, last: Finished) -> None:
        name = last.request_id
        generated_ids, expected_tokens = self.said.pop(name), self.expected[self.alive.pop(name)]
        assert last.finish_reason == ("abort" if name in self.aborted else "length")
        assert generated_ids == expected_tokens[: len(generated_ids)], (
            "a request that was aborted was right up to there"
        )
        assert last.usage.completion_tokens == len(generated_ids)
        if name not in self.aborted:
            assert generated_ids == expected_tokens
            self.num_whole += 1


@pytest.mark.parametrize(
    ("seed", "prefix_caching"), [(0, True), pytest.param(1, True, marks=pytest.mark.storm), (2, False)]
)
def test_random_submits_and_aborts_leave_other_tokens_unchanged(
    make_engine: Make, seed: int, prefix_caching: bool, storm: Callable[[int, int], int]
) -> None:
    """Hundreds of requests are submitted and aborted, with a pool that is often too small."""
    num_actions = storm(150, 700)
    jobs = make_jobs(24, prompts=(1, 30), outputs=(1, 16), shared=13)
    alone = make_engine(max_num_seqs=1)
    expected_tokens = [run_all(alone, [job])[0] for job in jobs]
    engine = make_engine(
        num_gpu_blocks_override=40, max_num_batched_tokens=24, max_num_seqs=8, enable_prefix_caching=prefix_caching
    )
    run = RandomLoad(engine, jobs, expected_tokens, seed)
    run.run(num_actions)
    counters = engine.snapshot().counters
    assert run.num_whole > 0.15 * num_actions
    assert len(run.aborted) > 0.25 * num_actions
    assert counters.preemptions > 0, "the pool was never too small: the test says less than it means to"
    assert (counters.num_running, counters.num_waiting) == (0, 0)
    assert counters.finished == run.num_whole
    check_all_released(engine)


VARIANTS: Mapping[str, dict[str, object]] = {
    "alone": {"max_num_seqs": 1},
    "a large batch": {"max_num_seqs": 32},
    "chunks of prefill": {"max_num_batched_tokens": 17, "max_num_seqs": 16},
    "a quarter of the blocks": {"num_gpu_blocks_override": 60},
    "chunks, a quarter of the blocks, no prefix cache": {
        "num_gpu_blocks_override": 60,
        "max_num_batched_tokens": 19,
        "enable_prefix_caching": False,
    },
    "contiguous": {"allocator": "contiguous", "enable_prefix_caching": False, "max_model_len": 128},
    "buddy, a quarter of the blocks": {
        "allocator": "buddy",
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 60,
    },
    "virtual": {"allocator": "virtual", "enable_prefix_caching": False},
    "virtual, a quarter of the blocks": {
        "allocator": "virtual",
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 60,
    },
    "blocks of one token": {"block_size": 1, "num_gpu_blocks_override": 400},
    "blocks of sixteen": {"block_size": 16, "num_gpu_blocks_override": 200},
}


@pytest.fixture(scope="module")
def load_jobs() -> list[Job]:
    return make_jobs(24, prompts=(4, 40), outputs=(30, 60), shared=21)


ROOM: Mapping[str, object] = {"num_gpu_blocks_override": 2048, "max_num_seqs": 24, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def expected_tokens(make_small: Make, load_jobs: list[Job]) -> list[list[int]]:
    """The tokens of each job if there is room for all."""
    with make_small(**ROOM) as engine:
        return run_all(engine, load_jobs)


PLAINER = ("a large batch", "virtual", "buddy, a quarter of the blocks", "blocks of sixteen")
"""Variants whose features other variants use as well."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.storm if name in PLAINER else ()) for name in VARIANTS]
)
def test_tokens_do_not_depend_on_other_requests(
    make_engine: Make, load_jobs: list[Job], expected_tokens: list[list[int]], variant: str
) -> None:
    """Greedy and seeded, in float32: only the options and the prompt determine the tokens."""
    assert len({tuple(tokens) for tokens in expected_tokens}) == len(load_jobs)
    engine = make_engine(**{**ROOM, "enable_prefix_caching": True, **VARIANTS[variant]})
    again = 2 if engine.hello.cache.prefix_caching else 1  # the second time with the prefix cache
    some = load_jobs[:4] if variant == "alone" else load_jobs  # a step a token
    for _ in range(again):
        assert run_all(engine, some) == expected_tokens[: len(some)]
    counters = engine.snapshot().counters
    if "quarter" in variant:
        needed = sum(-(-(len(job.ids) + (job.sampling.max_tokens or 0)) // 4) for job in load_jobs)
        cache = engine.hello.cache
        assert (cache.num_physical_blocks or cache.num_blocks) <= needed / 4
        assert counters.preemptions >= 10
    if again == 2:
        assert counters.cached_tokens > 0
    check_all_released(engine)


def test_another_seed_gives_other_tokens(make_engine: Make, load_jobs: list[Job]) -> None:
    """This shows that the comparison above can fail: other seeds give other tokens, no seed follows the engine's."""
    ids = load_jobs[0].ids

    def generated_ids(engine: Engine, **options: int) -> list[int]:
        return run_all(engine, [Job(ids, SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, **options))])[
            0
        ]

    engine = make_engine()
    assert generated_ids(engine, seed=1) == generated_ids(engine, seed=1) != generated_ids(engine, seed=2)
    assert generated_ids(engine) != generated_ids(engine), "two requests without a seed gave the same tokens"
    assert generated_ids(make_engine()) == generated_ids(make_engine()), "engines with one seed gave different tokens"
