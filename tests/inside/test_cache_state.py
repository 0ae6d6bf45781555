"""Changes of a cache state arrive unchanged in a mirror, whatever changed between two frames."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of

from kvscope_inside import CacheState, KnownRequest
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.validity import check_frame, check_snapshot
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror


def mirror_equals(mirror: Mirror, state: CacheState) -> bool:
    tables = {
        (request.number, group): table
        for request in state.requests.values()
        for group, table in enumerate(request.tables)
    }
    numbers = mirror.requests.number[mirror.requests.state != RequestState.FINISHED].tolist()
    return (
        mirror.ledger.equals(state.ledger)
        and numbers == sorted(state.requests)
        and all(mirror.requests.table(number, group).tolist() == table for (number, group), table in tables.items())
    )


def test_block_ids_after_the_gpu_pool_belong_to_host_memory_and_disk() -> None:
    hello = hello_of(4)
    state = CacheState(replace(hello, cache=replace(hello.cache, num_host_blocks=3, num_disk_blocks=2)))
    assert state.ledger.tier.tolist() == [Tier.HBM] * 4 + [Tier.HOST] * 3 + [Tier.DISK] * 2


@pytest.mark.parametrize("num_groups", [1, 3])
def test_mirror_of_a_watched_engine_equals_its_state_after_random_changes_and_lost_frames(num_groups: int) -> None:
    state, mirror, chance = CacheState(hello_of(num_groups=num_groups, num_reserved=1)), Mirror(), random.Random(5)
    mirror.apply(coalesce([], snapshot=state.snapshot()))
    alive: list[KnownRequest] = []
    for step in range(1, 400):
        for _ in range(chance.randrange(4)):
            what = chance.random()
            if what < 0.3:
                alive.append(state.add_request(f"r{step}", num_prompt_tokens=chance.randrange(1, 90)))
            elif alive and what < 0.45:
                state.finish(alive.pop(chance.randrange(len(alive))))
            elif alive:
                request, group = chance.choice(alive), chance.randrange(num_groups)
                start = chance.randrange(len(request.tables[group]) + 1)
                request.set_table([chance.randrange(32) for _ in range(chance.randrange(4))], group, start)
                request.state, request.num_computed_tokens = RequestState.RUNNING, step
                state.touch(request)
            blocks = chance.sample(range(1, 32), chance.randrange(5))
            state.set_blocks(blocks, state=BlockState.ACTIVE, ref_count=1, filled=chance.randrange(5), owner=step)
            state.free_blocks(chance.sample(range(1, 32), 2))
        frame = state.frame(step, step)
        check_frame(frame)
        if chance.random() < 0.9 and frame.seq == mirror.seq + 1:
            mirror.apply(coalesce([frame]))
        if frame.seq != mirror.seq:  # it was lost, and a snapshot repairs the mirror
            check_snapshot(snapshot := state.snapshot())
            mirror.apply(coalesce([], snapshot=snapshot))
        assert mirror_equals(mirror, state)


def test_reserved_blocks_are_neither_free_nor_used() -> None:
    state = CacheState(hello_of(num_reserved=2))
    assert state.ledger.state[:3].tolist() == [BlockState.UNMAPPED, BlockState.UNMAPPED, BlockState.FREE]


def test_block_set_twice_in_one_update_keeps_the_last_value() -> None:
    state = CacheState(hello_of())
    state.set_blocks([3, 3], filled=[1, 2])
    assert state.ledger.filled[3] == 2
    assert np.frombuffer(state.frame(1, 1).blocks.ids, "<u4").tolist() == [3]


def test_counters_of_a_watched_engine_are_sent_with_each_frame() -> None:
    state = CacheState(hello_of())
    state.count(prompt_tokens=3, admitted=1)
    state.count(prompt_tokens=4)
    assert state.frame(1, 1).counters.prompt_tokens == 7
    with pytest.raises(KeyError):
        state.count(prompt_token=1)


def test_received_tokens_are_counted_with_their_times() -> None:
    state = CacheState(hello_of())
    request = state.add_request("a", num_prompt_tokens=4, arrival_ns=100)
    state.set_num_output_tokens(request, 2, 400)
    state.set_num_output_tokens(request, 2, 450)
    state.set_num_output_tokens(request, 4, 1000)
    frame = state.frame(1, 1000)
    assert np.frombuffer(frame.first_token_ns, "<u8").tolist() == [300]
    assert np.frombuffer(frame.inter_token_ns, "<u8").tolist() == [0, 300, 300], (
        "two tokens that came at once do not share the time"
    )
    assert frame.counters.generation_tokens == 4
    assert state.frame(2, 1001).inter_token_ns == b""
