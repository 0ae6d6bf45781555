"""Tests of the use of pool slots under each kind of allocator."""

from __future__ import annotations

import msgspec
import pytest

from kvscope_app.views.memory.detail_rows import detail_rows
from kvscope_app.views.memory.memory_breakdown import kv_detail, memory_account
from kvscope_app.views.page_map.page_map_view import summaries
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import MemoryBreakdown
from kvscope_telemetry.mirror import pool_use as pool_use_module
from kvscope_telemetry.mirror.pool_use import pool_use
from kvscope_telemetry.source import Update

BLOCK = 368_640


@pytest.fixture
def make_mirror(engine, session, poll):
    """Function that returns a mirror of the engine with the given cache settings."""

    def make(num_layers=30, device="cpu", **cache):
        engine.hello = msgspec.structs.replace(
            engine.hello,
            cache=msgspec.structs.replace(engine.hello.cache, **cache),
            model=msgspec.structs.replace(engine.hello.model, num_layers=num_layers),
            device=msgspec.structs.replace(engine.hello.device, kind=device),
        )
        engine.source.updates.appendleft(Update(snapshot=engine.snapshot()))
        poll(session)
        return session.mirror

    return make


def test_paged_allocator_wastes_the_ends_of_last_blocks(engine, make_mirror):
    engine.write_blocks([0, 1, 9], filled=16)
    engine.write_blocks([5], filled=4)
    engine.write_blocks([6, 7], state=BlockState.CACHED, ref_count=0)
    use = pool_use(make_mirror())
    assert (use.num_used, use.num_reserved, use.num_wasted) == (52, 0, 12)
    assert (use.num_cached, use.num_free, use.num_slots) == (32, 58 * 16, 64 * 16)
    assert use.internal_fragmentation == pytest.approx(12 / 64)
    assert use.largest_free_run == 54 * 16
    assert use.external_fragmentation == pytest.approx(1 - 54 / 58)


@pytest.mark.parametrize("held", [range(60, 64), (*range(4), *range(60, 64))])
def test_free_runs_at_the_ends_are_counted_when_summing_in_pieces(engine, make_mirror, monkeypatch, held):
    monkeypatch.setattr(pool_use_module, "_PIECE_BLOCKS", 7)
    engine.write_blocks(held, filled=3)
    use = pool_use(make_mirror())
    assert use.num_used == 3 * len(held)
    assert use.largest_free_run == 16 * (64 - len(held))


def test_reserved_slots_beyond_the_token_limit_are_wasted(engine, make_mirror):
    engine.request(1, blocks=(0, 1), num_prompt_tokens=20, num_output_tokens=4, max_tokens=30)
    engine.write_blocks([0], owner=1, filled=16)
    engine.write_blocks([1], owner=1, filled=8)
    engine.write_blocks(range(2, 8), owner=1, filled=0)
    engine.request(2, blocks=(8,), num_prompt_tokens=10, num_output_tokens=0, max_tokens=0)
    engine.write_blocks([8], owner=2, filled=10)
    engine.write_blocks([9], owner=2, filled=0)
    use = pool_use(make_mirror(allocator="contiguous"))
    assert use.num_held == 10 * 16
    assert use.num_used == 34
    assert use.num_wasted == 8 * 16 - 50  # beyond prompt and limit of request 1; the limit of request 2 is unknown
    assert use.num_reserved == (50 - 24) + (32 - 10)
    assert use.external_fragmentation == 0.0


def test_slots_of_a_contiguous_run_held_by_an_unknown_request_count_as_reserved(engine, make_mirror):
    engine.write_blocks([3, 4], owner=77, filled=0)
    use = pool_use(make_mirror(allocator="buddy"))
    assert (use.num_reserved, use.num_wasted) == (32, 0)


def test_virtual_allocator_counts_slots_of_mapped_memory(engine, make_mirror):
    engine.write_blocks(range(64), state=BlockState.UNMAPPED, ref_count=0, owner=-1, filled=0)
    engine.request(1, blocks=(0, 1), num_prompt_tokens=20, num_output_tokens=4)
    engine.write_blocks([0], filled=16)
    engine.write_blocks([1], filled=8)
    engine.write_blocks(
        [2, 3], state=BlockState.FREE, ref_count=0, owner=-1, filled=0
    )  # still mapped after their request ended
    mirror = make_mirror(allocator="virtual", num_physical_blocks=10)
    use = pool_use(mirror)
    assert (use.num_used, use.num_wasted, use.num_free) == (24, 8, 8 * 16)
    assert use.external_fragmentation == 0.0
    assert mirror.num_available_blocks == 8
    assert summaries(mirror, mirror.hello.cache)[0].startswith(
        "10 blocks of memory in 64 locations  ·  2 active  ·  2 more"
    )


def test_virtual_allocator_on_a_gpu_holds_whole_pages(engine, make_mirror):
    engine.write_blocks(range(64), state=BlockState.UNMAPPED, ref_count=0, owner=-1, filled=0)
    engine.request(1, blocks=(0,), num_prompt_tokens=3, num_output_tokens=1)
    engine.write_blocks([0], filled=4)
    cache = {"allocator": "virtual", "num_physical_blocks": 40, "block_bytes": 2 * (2 << 20) // 20}
    mirror = make_mirror(num_layers=2, device="cuda", **cache)  # 20 blocks per page
    use = pool_use(mirror)
    assert (use.num_held, use.num_wasted, use.num_free) == (20 * 16, 20 * 16 - 4, 20 * 16)
    parts = {part.key: part.num_bytes for part in memory_account(mirror, None, None).parts}
    assert parts["kv_free"] == 39 * cache["block_bytes"]  # all pages were mapped at the start


def test_kv_cache_details_list_used_reserved_and_wasted_slots_and_mapped_memory(engine, make_mirror):
    engine.write_blocks([0], filled=4)
    mirror = make_mirror(dtype="int8")
    lines = {name.strip(): value for name, value, _ in detail_rows(kv_detail(mirror))}
    assert lines["used"] == "4 (25.0 %)"
    assert lines["reserved"] == "0 (0.0 %)"
    assert lines["wasted"] == "12 (75.0 %)"
    assert lines["KV type"] == "int8"
    assert "Memory behind blocks" not in lines
    memory = MemoryBreakdown(epoch=7, time_ns=1, kv_resident_bytes=2 * BLOCK)
    mirror = make_mirror(allocator="virtual", num_physical_blocks=10)
    lines = {name: value for name, value, _ in detail_rows(kv_detail(mirror, memory))}
    assert lines["Memory behind blocks"] == "720.0 KiB"


def test_pool_use_without_an_engine_is_empty(make_engine, make_session):
    engine = make_engine()
    engine.source.updates.clear()
    use = pool_use(make_session(engine).mirror)
    assert use.num_slots == 0
    assert use.internal_fragmentation is use.external_fragmentation is None
