"""The policies are compared for the same requests: by hand, under random load and against the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from kvscope_engine.policy.allocation.fragmentation import kv_use
from kvscope_engine.policy.request import Request
from kvscope_engine.simulator.what_if.comparison import PolicyComparison
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if import MapKind, PolicyUse, Running

PARTS = ("num_used", "num_reserved", "num_internal", "num_rounding", "num_external", "num_outside")
MIB = 1 << 20


def parts(use: PolicyUse) -> list[int]:
    return [getattr(use, name) for name in PARTS]


@pytest.mark.parametrize(
    ("name", "used_reserved_internal_rounding_external_outside"),
    [
        ("contiguous", [5, 2, 9, 0, 16, 0]),  # 16 slots are reserved, of which 2 may still be used
        ("buddy", [5, 2, 0, 1, 24, 0]),  # 3 tokens of prompt and 4 for an output of 3 are 7, in 2 blocks of 4
        ("virtual", [5, 0, 3, 0, 24, 0]),
        ("paged 4", [5, 0, 3, 0, 24, 0]),
        ("paged 8", [5, 0, 3, 0, 24, 0]),
        ("paged 16", [5, 0, 11, 0, 16, 0]),
        ("paged 32", [5, 0, 27, 0, 0, 0]),
    ],
)
def test_slots_used_and_wasted_by_one_request_equal_the_hand_calculation_for_each_policy(
    make_comparison, running, policy_use, name, used_reserved_internal_rounding_external_outside
):  # type: ignore[no-untyped-def]
    use = policy_use(make_comparison().update(running((1, 5, 7, 3))), name)
    assert parts(use) == used_reserved_internal_rounding_external_outside
    wasted = use.num_reserved + use.num_internal + use.num_rounding
    assert use.wasted_bytes == wasted * MIB // 2
    assert use.wasted_share == pytest.approx(wasted / (wasted + 5))
    assert (use.num_placed, use.num_waiting) == (1, 0)


def test_what_if_map_of_few_slots_shows_each_slot_separately(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    answer = make_comparison().update(running((1, 5, 7, 3)))
    assert {use.slots_per_cell for use in answer.policies} == {1}
    assert policy_use(answer, "contiguous").cells == bytes([1] * 5 + [2] * 2 + [3] * 9 + [0] * 16)
    assert policy_use(answer, "buddy").cells == bytes([1] * 5 + [2] * 2 + [4] + [0] * 24)
    assert policy_use(answer, "paged 16").cells == bytes([1] * 5 + [3] * 11 + [0] * 16)


def test_all_allocators_and_block_sizes_are_compared(make_comparison, running, paged_sizes):  # type: ignore[no-untyped-def]
    answer = make_comparison().update(running())
    names = [(use.allocator, use.block_size, use.is_current) for use in answer.policies]
    reserving = [("contiguous", 4, False), ("buddy", 4, False), ("virtual", 8, False)]
    assert names == [*reserving, ("paged", 4, True), *(("paged", size, False) for size in paged_sizes)]
    assert [use.block_size for use in answer.policies if use.refused] == [64, 128]


def test_policy_of_the_engine_is_marked_as_current(make_comparison, running):  # type: ignore[no-untyped-def]
    answer = make_comparison(allocator="buddy").update(running())
    assert [use.allocator for use in answer.policies if use.is_current] == ["buddy"]
    answer = make_comparison(allocator="virtual").update(running())
    assert [use.allocator for use in answer.policies if use.is_current] == ["virtual"]


def test_policies_that_need_unknown_values_are_left_out(make_comparison, running, paged_sizes):  # type: ignore[no-untyped-def]
    answer = make_comparison(max_model_len=0, num_layers=0, block_size=8).update(running((1, 5, 0)))
    assert [use.block_size for use in answer.policies] == list(paged_sizes)


def test_requests_that_do_not_fit_wait_and_are_placed_later(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    comparison = make_comparison()
    now = running((1, 1, 2), (2, 1, 2), (3, 1, 2), (4, 1, 2))
    contiguous = policy_use(comparison.update(now), "contiguous")  # 2 runs of 16 slots
    assert (contiguous.num_placed, contiguous.num_waiting) == (2, 2)
    answer = comparison.update(running((2, 1, 2), (3, 1, 2), (4, 1, 2)))
    assert (policy_use(answer, "contiguous").num_placed, policy_use(answer, "contiguous").num_waiting) == (2, 1)
    assert policy_use(answer, "paged 4").num_waiting == 0


def test_growing_request_preempts_the_newest(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    comparison = make_comparison(num_blocks=4)
    comparison.update(running((1, 8, 16), (2, 4, 16), (3, 4, 16)))
    grown = policy_use(comparison.update(running((1, 9, 16), (2, 4, 16), (3, 4, 16))), "paged 4")
    assert (grown.num_used, grown.num_placed, grown.num_waiting) == (9 + 4, 2, 1)
    alone = policy_use(comparison.update(running((3, 4, 16))), "paged 4")
    assert (alone.num_used, alone.num_waiting) == (4, 0)


def test_finished_requests_leave_gaps_that_are_external_fragmentation(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    comparison = make_comparison()
    four = [(number, 7, 8, 7) for number in (1, 2, 3, 4)]
    comparison.update(running(*four))
    buddy = policy_use(comparison.update(running(four[1], four[3])), "buddy")
    assert buddy.external_fragmentation == pytest.approx(0.5), "there are not two gaps of the same size"
    assert buddy.cells == bytes([*[0] * 8, *[1] * 7, 2, *[0] * 8, *[1] * 7, 2])


def test_buddy_run_in_the_what_if_comparison_moves_if_it_cannot_grow_in_place(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    comparison = make_comparison()
    comparison.update(running((1, 4, 16, 3), (2, 4, 16, 3), (3, 4, 16, 3)))
    buddy = policy_use(comparison.update(running((1, 9, 16, 3), (2, 4, 16, 3), (3, 4, 16, 3))), "buddy")
    assert (buddy.num_placed, buddy.num_used) == (3, 17)
    for shadow in comparison.shadows:
        shadow.check_integrity()


def test_what_if_comparison_replaces_a_request_whose_token_count_decreased(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    comparison = make_comparison()
    comparison.update(running((1, 12, 16)))
    assert policy_use(comparison.update(running((1, 3, 16))), "paged 4").num_used == 3


def test_longest_request_larger_than_the_memory_is_refused(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    use = policy_use(make_comparison(max_model_len=64).update(running((1, 5, 7))), "contiguous")
    assert "max_model_len=64" in use.refused
    assert use.cells == b""


def test_rest_of_the_memory_smaller_than_a_block_is_counted_as_outside(make_comparison, running, policy_use):  # type: ignore[no-untyped-def]
    use = policy_use(make_comparison(num_blocks=9).update(running((1, 5, 7))), "paged 16")
    assert parts(use) == [5, 0, 11, 0, 16, 4]
    assert use.cells[-4:] == bytes([MapKind.ROUNDING] * 4)
    virtual = policy_use(make_comparison(num_blocks=9).update(running((1, 5, 7))), "virtual")
    assert parts(virtual) == [5, 0, 3, 0, 24, 4]


def test_what_if_comparison_with_too_many_slots_is_refused(make_memory):  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput, match="33554436 slots is too large"):
        PolicyComparison(make_memory(num_blocks=(1 << 23) + 1))


def churn(seed: int, num_lines: int, num_slots: int) -> Iterable[list[Running]]:
    """Yield requests that arrive, grow and end at random."""
    rng = random.Random(seed)
    alive: dict[int, list[int]] = {}
    number = 0
    for _ in range(num_lines):
        for gone in [n for n in alive if rng.random() < 0.15]:
            del alive[gone]
        for request in alive.values():
            request[0] = min(request[0] + rng.choice((0, 1, 3, 40)), request[1])
        for _ in range(rng.randrange(4)):
            number += 1
            prompt = rng.randrange(1, num_slots // 12)
            limit = prompt + rng.randrange(1, num_slots // 12)
            alive[number] = [rng.randrange(1, prompt + 1), limit, prompt]
        yield [Running(n, *values) for n, values in alive.items()]


@pytest.mark.parametrize(("seed", "num_blocks"), [(1, 64), (2, 64), (3, 4100)])
def test_what_if_policies_stay_consistent_under_random_load(make_comparison, seed, num_blocks):  # type: ignore[no-untyped-def]
    comparison = make_comparison(
        num_blocks=num_blocks, block_size=16, block_bytes=1 << 18, max_model_len=num_blocks * 2
    )
    waited = 0
    for now in churn(seed, 60, num_blocks * 16):
        answer = comparison.update(now)
        for shadow in comparison.shadows:
            shadow.check_integrity()
        for use in answer.policies:
            check(use, use.slots_per_cell, now)
            waited += use.num_waiting
    assert waited > 0


def check(use: PolicyUse, slots_per_cell: int, now: list[Running]) -> None:
    """Check that the parts sum up to the whole and that the map shows them."""
    if use.refused:
        return
    assert sum(parts(use)) + use.num_unread == use.num_slots
    assert min(parts(use)) >= 0
    assert use.num_placed + use.num_waiting == len(now)
    assert use.num_used <= sum(running.num_tokens for running in now)
    shown = [use.cells.count(kind) * slots_per_cell for kind in MapKind]
    rounding = use.num_rounding + use.num_outside
    meant = [use.num_external, use.num_used, use.num_reserved, use.num_internal, rounding, use.num_unread]
    slack = 0 if slots_per_cell == 1 else 4 * slots_per_cell
    assert all(abs(one - other) <= slack for one, other in zip(shown, meant, strict=True)), (shown, meant)


def running_of(request: Request) -> Running:
    prompt = request.num_prompt_tokens
    return Running(request.number, request.num_computed_tokens, prompt + request.max_tokens, prompt)


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_what_if_use_of_the_current_allocator_equals_that_of_the_simulated_scheduler(
    make_simulation, make_comparison, policy_use, allocator
):  # type: ignore[no-untyped-def]
    requests = [(number * 0.5, 3 + number % 7, 2 + number % 11) for number in range(40)]
    simulation = make_simulation(requests, allocator, num_blocks=1024, enable_prefix_caching=False)
    comparison: Callable = make_comparison(num_blocks=1024, max_model_len=32)  # type: ignore[type-arg]
    most = 0
    while simulation.advance():
        placed = [request for request in simulation.scheduler.requests.values() if request.block_table]
        answer = comparison.update(sorted(map(running_of, placed), key=lambda r: r.number))  # type: ignore[attr-defined]
        use, real = policy_use(answer, f"{allocator} 4"), kv_use(simulation.pool, placed)
        assert parts(use)[:5] == [
            real.num_used,
            real.num_reserved,
            real.num_internal,
            real.num_rounding,
            real.num_external,
        ]
        most = max(most, use.num_placed)
    assert most > 5
