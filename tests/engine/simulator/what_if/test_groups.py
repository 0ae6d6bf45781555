"""Memories with several KV groups: what windows free, what if they did not, and latents as keys and values."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvscope_engine.policy.allocation.fragmentation import kv_use
from kvscope_engine.simulator.kv_layout import recorded_layout
from kvscope_engine.simulator.what_if.comparison import PolicyComparison
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup
from kvscope_telemetry.messages.what_if import EXPANDED, NOT_FREED, MapKind, Memory, PolicyUse, Running, WhatIfAnswer

FULL = KVGroup(kind="full", num_layers=2, block_bytes=64)
WINDOW = KVGroup(kind="window", num_layers=2, block_bytes=64, window=8)
CHUNKS = KVGroup(kind="chunked", num_layers=2, block_bytes=64, window=8)
LATENT = KVGroup(kind="latent", num_layers=2, block_bytes=64, expanded_bytes=640)


def memory(*groups: KVGroup, **changes: Any) -> Memory:
    """Return 40 blocks of 4 tokens and 64 bytes; a page of 16 bytes holds two tokens of a layer."""
    whole = {"num_blocks": 40, "block_size": 4, "block_bytes": 64, "max_model_len": 64, "page_bytes": 16}
    return Memory(groups=groups, **(whole | changes))


def policy_use(answer: WhatIfAnswer, question: str = "", block_size: int = 4, allocator: str = "paged") -> PolicyUse:
    (found,) = (
        use
        for use in answer.policies
        if (use.question, use.block_size if allocator == "paged" else block_size, use.allocator)
        == (question, block_size, allocator)
    )
    return found


def test_window_frees_the_blocks_behind_it() -> None:
    """Of 33 tokens the full group holds 9 blocks. The 34th token reads from position 26 on, which is in block 6: both
    windows hold 3 blocks, with 9 tokens of which 7 are read.
    """
    answer = PolicyComparison(memory(FULL, WINDOW, WINDOW)).update([Running(1, 33, 50, 20)])
    use = policy_use(answer)
    assert use.is_current
    assert (use.num_used, use.num_unread, use.num_internal) == (33 + 7 + 7, 2 + 2, 3 * 3)
    assert use.num_external == 160 - (9 + 3 + 3) * 4
    assert use.wasted_bytes == (4 + 9) * 16
    assert use.num_fitting == 160 // 60


def test_without_freeing_all_layers_hold_all_tokens() -> None:
    """A token takes 48 bytes and 53 tokens fit; in two thirds of the layers the next token does not read 26 of them."""
    answer = PolicyComparison(memory(FULL, WINDOW, WINDOW)).update([Running(1, 33, 50, 20)])
    use = policy_use(answer, NOT_FREED)
    assert not use.is_current
    assert (use.num_slots, use.slot_bytes) == (40 * 64 // 48, 48)
    assert use.num_unread == 26 * 2 // 3
    assert (use.num_used + use.num_unread, use.num_internal) == (33, 3)
    assert use.wasted_bytes == (17 + 3) * 48
    assert use.num_fitting == 1
    assert answer.not_asked == []
    assert use.cells == bytes([MapKind.UNREAD] * 17 + [1] * 16 + [3] * 3 + [0] * 16 + [4])


def test_without_freeing_fewer_requests_run_at_once() -> None:
    comparison = PolicyComparison(memory(FULL, WINDOW, WINDOW))
    answer = comparison.update([Running(number, 24, 50, 20) for number in (1, 2, 3)])
    assert (policy_use(answer).num_placed, policy_use(answer).num_waiting) == (3, 0)
    kept = policy_use(answer, NOT_FREED)
    assert (kept.num_placed, kept.num_waiting, kept.num_preempted) == (2, 1, 0)
    answer = comparison.update([Running(number, 28, 50, 20) for number in (1, 2, 3)])
    kept = policy_use(answer, NOT_FREED)
    assert (kept.num_placed, kept.num_waiting, kept.num_preempted) == (1, 2, 1)
    assert policy_use(answer).num_placed == 3


def test_reserving_allocators_hold_all_tokens_of_all_layers() -> None:
    answer = PolicyComparison(memory(FULL, WINDOW, num_blocks=64)).update([Running(1, 20, 24, 12)])
    contiguous = policy_use(answer, allocator="contiguous")
    assert contiguous.slot_bytes == 32
    assert (contiguous.num_used, contiguous.num_unread) == (20 - 6, 6), "half of 13 tokens"
    virtual = policy_use(answer, allocator="virtual")
    assert (virtual.block_size, virtual.num_unread) == (4, 6)


def test_chunk_is_freed_when_a_new_chunk_begins() -> None:
    """After 8 tokens a new chunk begins and nothing of the old one is read."""
    answer = PolicyComparison(memory(FULL, CHUNKS)).update([Running(1, 8, 50, 8)])
    use = policy_use(answer)
    assert (use.num_used, use.num_unread, use.num_internal) == (8, 0, 0)
    assert policy_use(answer, NOT_FREED).num_unread == 4
    answer = PolicyComparison(memory(FULL, CHUNKS)).update([Running(1, 7, 50, 7)])
    assert (policy_use(answer).num_used, policy_use(answer, NOT_FREED).num_unread) == (14, 0)


def test_single_window_group_frees_unread_tokens() -> None:
    answer = PolicyComparison(memory(WINDOW)).update([Running(1, 33, 50, 20)])
    assert (policy_use(answer).num_used, policy_use(answer, NOT_FREED).num_unread) == (7, 26)
    assert policy_use(answer, NOT_FREED).num_slots == 160


def test_latents_as_keys_and_values_take_proportionally_more_memory() -> None:
    answer = PolicyComparison(memory(LATENT)).update([Running(number, 6, 20, 5) for number in (1, 2, 3)])
    now, wide = policy_use(answer), policy_use(answer, EXPANDED)
    assert (now.num_placed, now.num_fitting) == (3, 20)
    assert (wide.num_slots, wide.slot_bytes) == (16, 160)
    assert (wide.num_placed, wide.num_waiting, wide.num_fitting) == (2, 1, 2)
    assert wide.wasted_bytes == 2 * 2 * 160


def test_what_if_comparisons_that_need_unknown_values_are_left_out_with_the_reason() -> None:
    answer = PolicyComparison(memory(KVGroup(kind="latent", block_bytes=64))).update([])
    assert [(one.question, "how large" in one.why) for one in answer.not_asked] == [(EXPANDED, True)]
    answer = PolicyComparison(memory(KVGroup(kind="full"), KVGroup(kind="window", window=8))).update(
        [Running(1, 33, 50, 20)]
    )
    assert [(one.question, "how many bytes" in one.why) for one in answer.not_asked] == [(NOT_FREED, True)]
    assert {use.allocator for use in answer.policies} == {"paged"}
    assert policy_use(answer).num_used == 33 + 7
    state = KVGroup(kind="state", block_size=4096, block_bytes=64)
    answer = PolicyComparison(memory(FULL, WINDOW, state)).update([])
    assert [(one.question, "States" in one.why) for one in answer.not_asked] == [(NOT_FREED, True)]
    assert {use.question for use in PolicyComparison(memory(FULL)).update([]).policies} == {""}


def test_recurrent_state_takes_one_block_for_requests_of_any_length() -> None:
    state = KVGroup(kind="state", block_size=4096, block_bytes=64)
    comparison = PolicyComparison(memory(FULL, state))
    assert policy_use(comparison.update([Running(1, 3, 50, 3)])).num_used == 3 + 4
    assert policy_use(comparison.update([Running(1, 33, 50, 3)])).num_used == 33 + 4
    assert policy_use(comparison.update([])).num_used == 0


def test_groups_with_separate_pools_are_compared() -> None:
    """As in SGLang, there are 10 pages for full attention, 4 for windows and 3 states."""
    own = (
        KVGroup(kind="full", num_layers=2, block_size=4, block_bytes=64, num_blocks=10),
        KVGroup(kind="window", num_layers=4, block_size=4, block_bytes=128, window=5, num_blocks=4),
        KVGroup(kind="state", block_size=256, block_bytes=100, num_blocks=3),
    )
    comparison = PolicyComparison(memory(*own, num_blocks=17, block_bytes=80))
    answer = comparison.update([Running(number, 8, 50, 8) for number in (1, 2, 3, 4)])
    use = policy_use(answer)
    assert (use.num_placed, use.num_waiting) == (3, 1), "of windows 4 tokens are read, in one page; states are 3"
    assert use.num_slots == 40 + 4 * 4 * 2 + 3 * 100 // 16
    assert use.num_used == 3 * 8 + 3 * 4 * 2 + 300 // 16
    whole = policy_use(answer, NOT_FREED)
    assert (whole.slot_bytes, whole.num_placed) == (48, 3), "24 tokens in 1,152 bytes"
    for shadow in comparison.shadows:
        shadow.check_integrity()


def test_blocks_of_several_sizes_in_one_pool_are_compared() -> None:
    """A block of the first group takes four rows and one of the other a single row, each with its own number of
    tokens.
    """
    groups = (
        KVGroup(kind="full", num_layers=8, block_size=16, block_bytes=256),
        KVGroup(kind="window", num_layers=2, block_size=4, block_bytes=64, window=8),
    )
    use = policy_use(PolicyComparison(memory(*groups)).update([Running(1, 16, 50, 16)]))
    assert use.num_used == 16 + 7
    use = policy_use(PolicyComparison(memory(*groups, block_size=16)).update([Running(1, 16, 50, 16)]), block_size=16)
    assert use.num_used == 4 * 16 + 7 * 4, "slots of a row, which holds 4 tokens of either group"


@pytest.mark.parametrize("groups", [(FULL, WINDOW, CHUNKS), (WINDOW,), (LATENT, WINDOW)])
def test_what_if_kv_groups_stay_consistent_under_random_load(groups: tuple[KVGroup, ...]) -> None:
    rng, alive, number, waited = random.Random(5), dict[int, list[int]](), 0, 0
    comparison = PolicyComparison(memory(*groups, num_blocks=80, max_model_len=128))
    for _ in range(60):
        for gone in [n for n in alive if rng.random() < 0.15]:
            del alive[gone]
        for request in alive.values():
            request[0] = min(request[0] + rng.choice((0, 1, 3, 20)), request[1])
        for _ in range(rng.randrange(4)):
            number += 1
            prompt = rng.randrange(1, 40)
            alive[number] = [rng.randrange(1, prompt + 1), prompt + rng.randrange(1, 40), prompt]
        answer = comparison.update([Running(n, *values) for n, values in alive.items()])
        for shadow in comparison.shadows:
            shadow.check_integrity()
        for use in (use for use in answer.policies if not use.refused):
            assert use.num_held + use.num_external + use.num_outside == use.num_slots
            assert use.slots_per_cell == 1
            shown = use.cells.count(MapKind.USED), use.cells.count(MapKind.UNREAD)
            assert shown == (use.num_used, use.num_unread)
            waited += use.num_waiting
    assert waited > 0


def test_invalid_groups_are_refused() -> None:
    with pytest.raises(BadInput, match="-1"):
        PolicyComparison(memory(KVGroup(kind="window", window=-1)))
    with pytest.raises(BadInput, match="65 KV groups"):
        PolicyComparison(memory(*[FULL] * 65))


@pytest.mark.parametrize("other", [WINDOW, CHUNKS])
def test_what_if_use_of_several_kv_groups_equals_that_of_the_simulated_scheduler(
    make_simulation, other: KVGroup
) -> None:  # type: ignore[no-untyped-def]
    told = (FULL, other, other)
    layout = recorded_layout(CacheInfo(num_blocks=1, block_size=4, groups=told))
    requests = [(number * 0.5, 3 + number % 7, 2 + number % 17) for number in range(40)]
    simulation = make_simulation(requests, layout=layout, num_blocks=513, enable_prefix_caching=False)
    comparison, most = PolicyComparison(memory(*told, num_blocks=512)), 0
    while simulation.advance():
        placed = [request for request in simulation.scheduler.requests.values() if request.block_table]
        now = [
            Running(one.number, one.num_computed_tokens, one.num_prompt_tokens + one.max_tokens, one.num_prompt_tokens)
            for one in sorted(placed, key=lambda one: one.number)
        ]
        use, real = policy_use(comparison.update(now)), kv_use(simulation.pool, placed)
        assert (use.num_used + use.num_unread, use.num_internal) == (real.num_used, real.num_internal)
        assert use.num_external == real.num_external
        most = max(most, use.num_placed)
    assert most > 5
