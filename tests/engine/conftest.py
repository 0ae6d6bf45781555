"""Fixtures: a pool and a scheduler driven without a model, over a fake KV cache that detects every wrong block; tiny
real engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.allocation.address_space import AddressSpace, address_space, page_range
from kvscope_engine.policy.allocation.allocators import make_allocation, make_pool
from kvscope_engine.policy.kv_groups import ONE_GROUP, GroupRule
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler, SchedulerConfig
from kvscope_engine.policy.state_pool import StatePool
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult, without_ended
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

if TYPE_CHECKING:
    from kvscope_engine import Engine

POISON = -1
VOCABULARY = 50


@pytest.fixture(scope="session", autouse=True)
def patient_compiler() -> Iterator[None]:
    """Raise the time limits of the structured-output compiler, which gets little CPU while other tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvscope_engine.structured_output.structured_output_manager.MAX_WAIT_S", 500.0)
        yield


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Empty cache folder in place of the user's, which may contain measurements and tunings of this machine."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSCOPE_CACHE", str(folder))
        yield folder


@dataclass(frozen=True)
class Shape:
    """Sizes of a pool and limits of a scheduler."""

    num_blocks: int = 32
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_model_len: int = 1024
    prefix_caching: bool = True
    allocator: str = "paged"
    knows_lengths: bool = False
    """Whether requests have `expected_tokens`."""
    num_host: int = 0
    num_disk: int = 0
    num_states: int = 0
    """Slots for states of recurrent layers, which are saved every `state_interval` tokens."""
    num_host_states: int = 0
    state_interval: int = 16
    preemption: str = "swap"
    max_adapters: int = 0
    block_bytes: tuple[int, ...] = (24,)
    """Bytes of a block in each tensor. Together with `page_bytes` used by the policy `virtual`."""
    page_bytes: int = 32
    groups: tuple[GroupRule, ...] = ONE_GROUP

    def space(self) -> AddressSpace:
        """Address space of the policy `virtual`."""
        return address_space(
            block_bytes=self.block_bytes,
            page_bytes=self.page_bytes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
        )


class FakePages:
    """A mapper that detects pages mapped twice, unmapped while absent, or mapped beyond the memory."""

    def __init__(self, shape: Shape) -> None:
        space = shape.space()
        self.block_bytes, self.page_bytes = shape.block_bytes, shape.page_bytes
        self.budget = space.num_groups * sum(space.group_pages)
        assert self.budget * shape.page_bytes <= shape.num_blocks * sum(shape.block_bytes)
        self.pages: set[tuple[int, int]] = set()
        self.num_unmapped = 0

    def map(self, first_block: int, num_blocks: int) -> None:
        fresh = self._pages(first_block, num_blocks)
        assert not fresh & self.pages, "a page is mapped twice"
        self.pages |= fresh
        assert len(self.pages) <= self.budget, "more pages are mapped than there are"
        self.check_backed(range(first_block, first_block + num_blocks))

    def unmap(self, first_block: int, num_blocks: int) -> None:
        gone = self._pages(first_block, num_blocks)
        assert gone <= self.pages, "a page is unmapped that is not mapped"
        self.pages -= gone
        self.num_unmapped += len(gone)

    def check_backed(self, blocks: Sequence[int]) -> None:
        """Check that every byte of these blocks is backed by memory."""
        for tensor, size in enumerate(self.block_bytes):
            for block in blocks:
                pages = range(block * size // self.page_bytes, ((block + 1) * size - 1) // self.page_bytes + 1)
                assert {(tensor, page) for page in pages} <= self.pages, f"block {block} is used without memory"

    def _pages(self, first_block: int, num_blocks: int) -> set[tuple[int, int]]:
        assert num_blocks > 0, "nothing is to be mapped or unmapped"
        return {
            (tensor, page)
            for tensor, size in enumerate(self.block_bytes)
            for page in page_range(first_block, num_blocks, size, self.page_bytes)
        }


def running_hashes(tokens: Sequence[int], adapter: Adapter | None = None) -> list[int]:
    """Return a number per position that identifies all tokens up to it and the adapter, as their KV would."""
    value, hashes = 7 if adapter is None else 7 + int.from_bytes(adapter.key[:4], "big"), []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (1 << 61)
        hashes.append(value)
    return hashes


def next_token(tokens: Sequence[int], adapter: Adapter | None = None) -> int:
    """Return the token that the fake model generates after `tokens`."""
    return running_hashes(tokens, adapter)[-1] % VOCABULARY


def completion(prompt: Sequence[int], max_tokens: int, adapter: Adapter | None = None) -> list[int]:
    """Return the tokens that a request must generate, whatever else runs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, adapter))
    return tokens[len(prompt) :]


class FakeMover:
    """Copies numbers instead of bytes and delays saves as long as allowed. The disk fails when the test says so."""

    def __init__(self, kv: Any, shape: Shape) -> None:
        self.kv = kv
        self.host = np.full((shape.num_host, shape.block_size), POISON, np.int64)
        self.disk = np.full((shape.num_disk, shape.block_size), POISON, np.int64)
        self.has_disk = shape.num_disk > 0
        self.failure = ""
        self.bad: set[int] = set()
        """Places on disk that cannot be read back whole."""
        self.pending: list[tuple[int, int]] = []
        self.seconds_per_block = 1e-6
        self.num_offloadable = 1 << 30

    def save(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        assert len(set(places)) == len(places) == len(blocks)
        self.pending += zip(blocks, places, strict=True)

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        assert len(set(blocks)) == len(places) == len(blocks)
        self.flush()
        self.kv[list(blocks)] = self.host[list(places)]

    def offload(self, places: Sequence[int], disk_slots: Sequence[int], prefixes: Sequence[Any]) -> list[bool]:
        assert len(places) == len(disk_slots) == len(prefixes)
        self.flush()
        if self.failure:
            self.has_disk = False
            return [False] * len(places)
        self.disk[list(disk_slots)] = self.host[list(places)]
        self.bad -= set(disk_slots)
        return [True] * len(places)

    def load_from_disk(self, disk_slots: Sequence[int], places: Sequence[int]) -> list[bool]:
        self.flush()
        good = [place not in self.bad for place in disk_slots]
        for disk_place, place, ok in zip(disk_slots, places, good, strict=True):
            self.host[place] = self.disk[disk_place] if ok else POISON
        return good

    def flush(self) -> None:
        pending, self.pending = self.pending, []
        for block, place in pending:
            self.host[place] = self.kv[block]

    def swap_seconds(self, num_blocks: int) -> float:
        return 2 * num_blocks * self.seconds_per_block

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        return (num_blocks + num_from_disk) * self.seconds_per_block

    def forget_prefixes(self) -> None:
        pass

    def recovered(self) -> list[tuple[int, Any]]:
        return []


class Drive:
    """Runs steps. Each step checks the plan, the pool, and that every token sees exactly its own past."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        space = shape.space() if shape.allocator == "virtual" else None
        self.pages = FakePages(shape) if space else None
        num_rows = space.num_rows if space else shape.num_blocks
        self.pool = make_pool(
            shape.allocator,
            num_rows,
            shape.block_size,
            prefix_caching=shape.prefix_caching,
            salt=b"test",
            other_tiers={
                Tier.HOST: shape.num_host,
                Tier.DISK: shape.num_disk,
                Tier.STATES: shape.num_states,
                Tier.HOST_STATES: shape.num_host_states,
            },
            space=space,
            groups=shape.groups,
        )
        self.kv = np.full((num_rows, shape.block_size), POISON, np.int64)
        self.mover = FakeMover(self.kv, shape)
        self.states = [POISON] * (shape.num_states + shape.num_host_states)
        """Contents of each slot, on the device and in host memory: a number that depends on all tokens before."""
        states = StatePool(self.pool, shape.state_interval, shape.max_model_len, keeps_checkpoints=shape.prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            make_allocation(shape.allocator, self.pool, max_model_len=shape.max_model_len, mapper=self.pages),
            SchedulerConfig(
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
                max_model_len=shape.max_model_len,
                preemption=shape.preemption,
                max_adapters=shape.max_adapters,
            ),
            mover=self.mover if shape.num_host else None,
            states=states if shape.num_states else None,
        )
        self.step_count = 0
        self.now_ns = 0
        self.num_requests = 0
        self.flight: tuple[StepPlan, StepResult] | None = None
        self.num_ahead = 0
        """Steps that were scheduled while another ran."""
        self.sampled: dict[int, int] = {}
        """On the device: the last token of each request."""

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        priority: int = 0,
        client: str = "",
        batch: str = "",
        adapter: Adapter | None = None,
    ) -> Request:
        """Return a new request that is not queued yet."""
        self.num_requests += 1
        self.now_ns += 1000
        return Request(
            number=self.num_requests,
            request_id=f"r{self.num_requests}",
            prompt_token_ids=list(prompt),
            sampling=ResolvedSampling(),
            max_tokens=max_tokens,
            arrival_ns=self.now_ns,
            priority=priority,
            client=client,
            batch=batch,
            adapter=adapter,
            expected_tokens=len(prompt) + max_tokens if self.shape.knows_lengths else None,
        )

    def submit(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Request:
        """Queue a new request; `options` are those of `request`."""
        request = self.request(prompt, max_tokens, **options)
        self.scheduler.add_request(request)
        return request

    def fork(self, parent: Request) -> Request:
        """Return a child request with the parent's tokens."""
        child = self.request(parent.prompt_token_ids, parent.max_tokens, adapter=parent.adapter)
        child.output_token_ids[:] = parent.output_token_ids
        self.scheduler.fork(parent, child, self.now_ns)
        return child

    def siblings(self, prompt: Sequence[int], max_tokens: int, count: int) -> list[Request]:
        """Queue a request and `count` further completions of its prompt, which wait until the prompt is computed."""
        parent = self.submit(prompt, max_tokens, batch=f"b{self.num_requests}")
        children = [self.request(prompt, max_tokens, batch=parent.batch) for _ in range(count)]
        for child in children:
            child.parent = parent.number
            self.scheduler.add_request(child)
        return [parent, *children]

    def step(self, abort: Request | None = None, *, ahead: bool = False) -> tuple[StepPlan, StepResult]:
        """Schedule, run, commit, distribute tokens and finish requests, with all checks.

        `abort` is aborted between schedule and commit. With `ahead` the next step is launched before this one is
        committed, if the scheduler can: its sampled tokens are unknown until then.
        """
        self.step_count += 1
        self.now_ns += 1_000_000
        flight = self._take_flight() or self._launch(self.scheduler.schedule(self.step_count, self.now_ns), None)
        if ahead and flight[0].scheduled and not self.scheduler.overlap_blocker(flight[0]):
            plan = self.scheduler.schedule_ahead(flight[0], self.now_ns)
            self.flight = self._launch(plan, flight[0]) if plan.scheduled else None
            self.num_ahead += self.flight is not None
        if abort is not None:
            self.scheduler.abort(abort, self.now_ns)
            self.scheduler.check_integrity()
        return self._commit(*flight)

    def settle(self) -> None:
        """Commit the step in flight, if there is one."""
        flight = self._take_flight()
        if flight is not None:
            self.step_count += 1
            self._commit(*flight)

    def _take_flight(self) -> tuple[StepPlan, StepResult] | None:
        flight, self.flight = self.flight, None
        if flight is None or all(item.request.is_finished for item in flight[0].scheduled):
            return None
        return flight

    def _launch(self, plan: StepPlan, running: StepPlan | None) -> tuple[StepPlan, StepResult]:
        """Run the step with the device's tokens, before the host knows them."""
        self.scheduler.check_integrity()
        self._check_plan(plan, {item.request.number: item for item in running.scheduled} if running else {})
        assert not self.mover.pending, "a step runs before its blocks were saved"
        return plan, StepResult(self._run(plan))

    def _commit(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        plan, result = without_ended(plan, result)
        self.scheduler.commit(plan, self.step_count, self.now_ns)
        for item, tokens in zip(plan.scheduled, result.token_ids, strict=True):
            for token in tokens:
                self._give(item.request, token)
        self.scheduler.check_integrity()
        self.forget_freed()
        return plan, result

    def forget_freed(self) -> None:
        """Forget the contents of free blocks, which must not be read."""
        state = self.pool.ledger.state[: self.pool.num_blocks]
        self.kv[np.isin(state, (BlockState.FREE, BlockState.UNMAPPED))] = POISON

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no request is unfinished. Returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.requests:
                return count
            plan, _ = self.step()
            assert plan.scheduled, "a step made no progress although requests are unfinished"
        raise AssertionError(f"requests are unfinished after {max_steps} steps")

    def _give(self, request: Request, token: int) -> None:
        request.output_token_ids.append(token)
        if len(request.output_token_ids) >= request.max_tokens:
            self.scheduler.finish(request, "length", self.now_ns)

    def _run(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        for source, target in plan.copies:
            self.kv[target] = self.kv[source]
        if self.states:
            self._change_states(plan)
        for item in plan.scheduled:
            self._write(item)
        return tuple(self._sample(item) for item in plan.scheduled)

    def _change_states(self, plan: StepPlan) -> None:
        for source, target in plan.state_copies:
            assert min(source, target) < self.shape.num_states, "a state is copied within host memory"
            self.states[target] = self.states[source]
        if plan.scheduled:
            for slot in np.flatnonzero(self.pool.ledger.state[self.pool.first_state :] == BlockState.FREE).tolist():
                self.states[slot] = POISON
        kept = [save.slot for save in plan.state_saves]
        assert len(set(kept)) == len(kept), "two states are kept in one slot"
        for item in plan.scheduled:
            hashes, slot = running_hashes(self._tokens(item)), item.request.state_slot
            assert not item.start or self.states[slot] == hashes[item.start - 1], "a request goes on from another state"
            self.states[slot] = hashes[-1]
            for save in plan.state_saves:
                if save.request is item.request:
                    assert item.start < save.num_tokens <= item.start + item.num_tokens, "it is not there in this step"
                    self.states[save.slot] = hashes[save.num_tokens - 1]

    def _tokens(self, item: Scheduled) -> Sequence[int]:
        """Return the tokens up to the last that `item` computes: those known to the host, then those sampled on the
        device.
        """
        stop = item.start + item.num_tokens
        known = item.request.tokens(0, stop)
        return known if len(known) == stop else [*known, self.sampled[item.request.number]]

    def _write(self, item: Scheduled) -> None:
        tokens = self._tokens(item)
        for position, value in list(enumerate(running_hashes(tokens, item.request.adapter)))[item.start :]:
            block, slot = divmod(position, self.shape.block_size)
            for group, table in enumerate(item.request.block_tables):
                self.kv[table[block], slot] = value + group

    def _sample(self, item: Scheduled) -> tuple[int, ...]:
        stop = item.start + item.num_tokens
        tokens, adapter = self._tokens(item), item.request.adapter
        if self.pages is not None:
            self.pages.check_backed(item.request.block_table)
        for group, (rule, table) in enumerate(zip(self.pool.groups, item.request.block_tables, strict=True)):
            first = rule.first_read(item.start)
            seen = self.kv[table].reshape(-1)[first:stop].tolist()
            past = [value + group for value in running_hashes(tokens, adapter)[first:]]
            assert seen == past, f"request {item.request.number} reads what is not its own past in group {group}"
        self.sampled[item.request.number] = next_token(tokens, adapter)
        return (next_token(tokens, adapter),) if item.samples else ()

    def _check_plan(self, plan: StepPlan, running: dict[int, Scheduled]) -> None:
        shape, ledger = self.shape, self.pool.ledger
        counts = [item.num_tokens for item in plan.scheduled]
        assert plan.num_tokens == sum(counts) <= self.scheduler.limits.max_num_batched_tokens
        assert self.scheduler.num_running <= shape.max_num_seqs
        adapters = {item.request.adapter for item in plan.scheduled} - {None}
        assert len(adapters) <= shape.max_adapters, "more adapters run together than there are slots"
        assert all(count == 1 for count in counts[: plan.num_single_token])
        assert all(count > 1 for count in counts[plan.num_single_token :])
        assert len({item.request.number for item in plan.scheduled}) == len(counts)
        sources, targets = {source for source, _ in plan.copies}, [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets), "a block is copied to twice"
        assert not sources & set(targets), "a block is copied from and to in one step"
        for item in plan.scheduled:
            request, stop = item.request, item.start + item.num_tokens
            before = running.get(request.number)
            assert request.state is RequestState.RUNNING
            assert item.start == (request.num_computed_tokens if before is None else before.start + before.num_tokens)
            assert stop <= request.num_prompt_tokens + request.max_tokens - 1, "the last token is never an input"
            sampled = before is not None and before.samples
            assert item.samples == (stop == request.num_tokens + sampled)
            for group, table in enumerate(request.block_tables):
                written = table[item.start // shape.block_size : -(-stop // shape.block_size)]
                assert len(table) == -(-stop // shape.block_size)
                assert (ledger.ref_count[written] == 1).all(), "a shared block is written"
                assert (ledger.hash[written] == 0).all(), "a block of the prefix cache is written"
                assert (ledger.group[written] == group).all(), "a block of another group is written"


class PastMark:
    """A mark of a stream with no pending work."""

    def has_passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Any) -> float:
        return 1e-6


class PromptStreams:
    """Streams that run all work immediately. `before_mark` may raise what a GPU raises when it is out of memory."""

    def __init__(self, before_mark: Callable[[], None] = lambda: None) -> None:
        self.before_mark = before_mark

    def run(self, lane: str, work: Callable[[], None]) -> None:
        work()

    def mark(self, lane: str) -> PastMark:
        self.before_mark()
        return PastMark()

    def wait(self, lane: str, mark: Any) -> None:
        return None

    def finish(self, lane: str) -> None:
        return None


@pytest.fixture
def prompt_streams() -> type[PromptStreams]:
    return PromptStreams


@pytest.fixture
def drive() -> Callable[..., Drive]:
    """Function that makes a `Drive` from the fields of `Shape`."""
    return lambda **sizes: Drive(Shape(**sizes))


@pytest.fixture
def expected_completion() -> Callable[[Sequence[int], int], list[int]]:
    """Function that returns the tokens that a prompt must generate, whatever else runs."""
    return completion


@pytest.fixture(scope="session")
def make_small(tiny_model: Callable[..., str]) -> Callable[..., Engine]:
    """Function that makes a real float32 engine on a tiny random model from fields of EngineConfig; the caller closes
    it.
    """
    from kvscope_engine import Engine, EngineConfig

    def make(*, publish: Any = None, **options: Any) -> Engine:
        small = {"block_size": 4, "num_gpu_blocks_override": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}
        config = {"model": tiny_model(), "dtype": "float32", "device": "cpu"} | small | options
        return Engine(EngineConfig(**config), publish=publish)

    return make


@pytest.fixture
def make_engine(make_small: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Function like `make_small` whose engines are closed after the test."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(make_small(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
