"""A state machine over scheduler, pool and each allocation policy: blocks and requests stay consistent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.allocation.allocator_names import ALLOCATORS
from kvscope_engine.policy.allocation.fragmentation import kv_use
from kvscope_engine.policy.kv_groups import ONE_GROUP, GroupRule
from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.request_state import RequestState

ADAPTERS = tuple(Adapter(name, key * 32) for name, key in (("sql", b"a"), ("sql", b"b"), ("python", b"c")))
"""Adapters, two of which were loaded under the same name."""
Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


class SchedulerMachine(RuleBasedStateMachine):
    """`Drive` checks each step: every token sees its own past, and no copy's source is the target of another."""

    def __init__(
        self,
        drive: Make,
        completion: Make,
        allocator: str,
        knows_lengths: bool,
        *,
        has_tiers: bool = False,
        has_groups: bool = False,
    ) -> None:
        super().__init__()
        self.has_tiers, self.has_groups = has_tiers, has_groups
        self.make, self.completion = drive, completion
        self.allocator, self.knows_lengths = allocator, knows_lengths
        self.one: Any = None

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 40),
        prefix_caching=st.booleans(),
        share=st.integers(1, 8),
        num_host=st.integers(2, 12),
        num_disk=st.sampled_from([0, 5, 60, 60]),
        preemption=st.sampled_from(["swap", "swap", "auto", "recompute"]),
        block_bytes=st.sampled_from([(24,), (32,), (8, 8), (16, 48), (80, 32)]),
        groups=st.lists(
            st.builds(GroupRule, st.sampled_from([0, 1, 2, 3, 5, 8, 13, 30]), st.booleans()), min_size=1, max_size=4
        ),
        max_adapters=st.integers(1, 2),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        prefix_caching: bool,
        share: int,
        num_host: int,
        num_disk: int,
        preemption: str,
        block_bytes: tuple[int, ...],
        groups: list[GroupRule],
        max_adapters: int,
    ) -> None:
        longest_run = 1 << (num_blocks.bit_length() - 1)
        self.one = self.make(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max(4, longest_run * block_size // share),
            prefix_caching=prefix_caching and self.allocator == "paged",
            allocator=self.allocator,
            knows_lengths=self.knows_lengths,
            num_host=num_host if self.has_tiers else 0,
            num_disk=num_disk if self.has_tiers else 0,
            preemption=preemption,
            block_bytes=block_bytes,
            groups=tuple(groups) if self.has_groups else ONE_GROUP,
            max_adapters=max_adapters,
        )
        self.requests: list[Request] = []

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        new=st.integers(1, 30),
        priority=st.integers(0, 1),
        whose=st.sampled_from([("", ""), ("a", ""), ("a", "one"), ("a", "two"), ("b", "one")]),
        adapter=st.sampled_from((None, None, *ADAPTERS)),
    )
    def submit(
        self, family: int, length: int, new: int, priority: int, whose: tuple[str, str], adapter: Adapter | None
    ) -> None:
        options = {"priority": priority, "client": whose[0], "batch": whose[1], "adapter": adapter}
        try:
            self.requests.append(self.one.submit([family] * length, new, **options))
        except BadInput:
            assert length + new > self.one.scheduler.max_request_tokens
        else:  # more if the text starts with pinned blocks
            assert length + new <= self.one.scheduler.max_request_tokens or self.one.pool.pinned

    @precondition(lambda self: self.unfinished)
    @rule(times=st.integers(1, 12), ahead=st.booleans())
    def step(self, times: int, ahead: bool) -> None:
        for _ in range(times):
            plan, _ = self.one.step(ahead=ahead)
            assert plan.scheduled or not self.unfinished
            self._counts_agree()

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        self.one.scheduler.abort(self.unfinished[pick % len(self.unfinished)], self.one.now_ns)

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99), ahead=st.booleans())
    def abort_while_it_runs(self, pick: int, ahead: bool) -> None:
        """Abort between schedule and commit, of one step or of two."""
        self.one.step(abort=self.unfinished[pick % len(self.unfinished)], ahead=ahead)

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        self.one.settle()
        if not self.unfinished:
            return
        self.requests.append(self.one.fork(self.unfinished[pick % len(self.unfinished)]))

    @rule(length=st.integers(1, 20), new=st.integers(1, 12), count=st.integers(1, 3))
    def submit_several(self, length: int, new: int, count: int) -> None:
        if length + new <= self.one.scheduler.max_request_tokens:  # beside pinned blocks
            self.requests += self.one.siblings([3] * length, new, count)

    @precondition(lambda self: self.has_tiers)
    @rule(first=st.integers(0, 59), count=st.integers(1, 20))
    def make_disk_slots_unreadable(self, first: int, count: int) -> None:
        self.one.mover.bad |= set(range(first, first + count))

    @precondition(lambda self: self.has_tiers)
    @rule(dice=st.integers(0, 9))
    def break_the_disk(self, dice: int) -> None:
        if not dice:
            self.one.mover.failure = "no space left"

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99), how=st.sampled_from(["", "swap", "recompute"]))
    def preempt(self, pick: int, how: str) -> None:
        """Preempt between two steps, as a user requests it."""
        self.one.settle()
        running = [request for request in self.unfinished if request.state is RequestState.RUNNING]
        if not running:
            return
        request = running[pick % len(running)]
        record = self.one.scheduler.preempt(request, how, "ann", self.one.now_ns)
        if record is None:
            assert how == "swap"
            assert request.state is RequestState.RUNNING
        else:
            assert (request.state, request.block_table) == (RequestState.PREEMPTED, [])
            assert not self.one.mover.pending, "what it saved may be overwritten from now on"
        self.one.forget_freed()

    @rule(picks=st.sets(st.integers(0, 39), max_size=8))
    def pin(self, picks: set[int]) -> None:
        pool = self.one.pool
        blocks = [block for block in picks if block < pool.num_blocks and pool.ledger.hash[block]]
        before = set(pool.pinned)
        try:
            self.one.scheduler.pin(blocks)
        except BadInput:
            assert pool.pinned == before
        else:
            assert pool.pinned == before | set(blocks)

    @rule(picks=st.sets(st.integers(0, 39)))
    def unpin(self, picks: set[int]) -> None:
        self.one.pool.unpin(picks)

    @rule(picks=st.sets(st.integers(0, 39), max_size=8))
    def evict(self, picks: set[int]) -> None:
        blocks = [block for block in picks if self.one.pool.is_evictable(block)]
        if blocks:
            self.one.scheduler.evict(blocks, "ann", self.one.now_ns)
            self.one.forget_freed()

    @rule(max_num_seqs=st.integers(1, 8), budget=st.integers(1, 40))
    def change_limits(self, max_num_seqs: int, budget: int) -> None:
        shape = self.one.shape
        limits = min(max_num_seqs, shape.max_num_seqs), min(budget, shape.max_num_batched_tokens)
        self.one.scheduler.limits.set(*limits)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.one.scheduler.reset_prefix_cache(self.one.now_ns)

    @invariant()
    def is_whole(self) -> None:
        if self.one is not None:
            self.one.scheduler.check_integrity()
            self._counts_agree()

    def teardown(self) -> None:
        """Every request ends with the right tokens; no block is held, and free blocks are one run as at first."""
        if self.one is None:
            return
        self.one.run()
        for request in self.requests:
            if request.finish_reason == "length":
                assert request.output_token_ids == self.completion(
                    request.prompt_token_ids, request.max_tokens, request.adapter
                )
        self.one.scheduler.reset_prefix_cache(0)
        use = kv_use(self.one.pool, [])
        assert use.num_external == use.num_slots == use.largest_free_run

    @property
    def unfinished(self) -> list[Request]:
        return [] if self.one is None else list(self.one.scheduler.requests.values())

    def _counts_agree(self) -> None:
        use = kv_use(self.one.pool, self.unfinished)
        parts = (use.num_used, use.num_reserved, use.num_internal, use.num_rounding, use.num_cached, use.num_external)
        assert min(parts) >= 0
        assert sum(parts) == use.num_slots
        assert use.largest_free_run <= use.num_external
        if self.allocator != "paged":
            assert use.num_used == sum(request.num_computed_tokens for request in self.unfinished)


@pytest.mark.parametrize(
    ("allocator", "knows_lengths"),
    [(name, known) for name in ALLOCATORS for known in (False, True) if known or name != "oracle"],
)
def test_requests_and_blocks_stay_consistent(
    drive: Make, expected_completion: Make, allocator: str, knows_lengths: bool, storm: Callable[[int, int], int]
) -> None:
    _check_machine(lambda: SchedulerMachine(drive, expected_completion, allocator, knows_lengths), storm(8, 60))


def test_requests_and_blocks_stay_consistent_over_all_tiers(
    drive: Make, expected_completion: Make, storm: Callable[[int, int], int]
) -> None:
    """With swapping, offloading, eviction to disk, loading and loss: every request reads its own past, and every slot
    is accounted for.
    """
    _check_machine(lambda: SchedulerMachine(drive, expected_completion, "paged", False, has_tiers=True), storm(15, 150))


@pytest.mark.parametrize("has_tiers", [False, True])
def test_requests_and_blocks_stay_consistent_in_all_kv_groups(
    drive: Make, expected_completion: Make, has_tiers: bool, storm: Callable[[int, int], int]
) -> None:
    """Windows and chunks free blocks, and prompts hit what all groups have; no token misses what its layers read."""
    make = partial(SchedulerMachine, drive, expected_completion, "paged", False, has_tiers=has_tiers, has_groups=True)
    _check_machine(make, storm(20, 300))


def test_fork_that_takes_over_a_released_block_keeps_owner_and_kv_group_consistent(drive: Make) -> None:
    """A fork copies from a block that was released in this step and is allocated again, for another KV group.

    The copy is dropped, the fork keeps the block, and the other request gets the target of the copy. `drive` checks the
    group of all written blocks in the ledger.
    """
    groups = (GroupRule(0, False), GroupRule(3, False), GroupRule(1, False))
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 7, "max_model_len": 48, "max_adapters": 1}
    tiers = {"num_host": 4, "num_disk": 0, "preemption": "swap", "block_bytes": (24,)}
    one = drive(num_blocks=28, block_size=3, prefix_caching=True, groups=groups, **limits, **tiers)
    lengths_and_new = ((12, 1), (1, 1), (4, 4), (19, 1), (2, 2), (4, 1), (1, 1))
    requests = [request for length, new in lengths_and_new for request in one.siblings([3] * length, new, 1)]
    one.run()
    assert all(request.finish_reason == "length" for request in requests)


def _check_machine(machine: Callable[[], SchedulerMachine], max_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
        ),
    )
