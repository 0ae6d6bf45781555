"""llama.cpp's slots with one KV cache for all (`--kv-unified`), which neither `/slots` nor `/props` reports.

The recorded answers are of llama.cpp b11549 with `-c 4096`: without `-np` (unified), and with `-np 4` (separate).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from tests.telemetry.collectors.test_slot_source import LlamaServer, server, wait_for, wait_for_poll

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.slot_rows import SlotRows
from kvscope_telemetry.collectors.slot_source import SlotSource
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState

__all__ = ["server"]

RECORDED_SLOTS = """[{"id": 0, "n_ctx": %(n_ctx)d, "speculative": false, "is_processing": false},
 {"id": 1, "n_ctx": %(n_ctx)d, "speculative": false, "is_processing": false},
 {"id": 2, "n_ctx": %(n_ctx)d, "speculative": false, "is_processing": false},
 {"id": 3, "n_ctx": %(n_ctx)d, "speculative": false, "is_processing": false, "id_task": 0, "n_prompt_tokens": 48,
  "n_prompt_tokens_processed": 0, "n_prompt_tokens_cache": 0,
  "next_token": [{"has_next_token": false, "has_new_line": false, "n_remain": -1, "n_decoded": 0}]}]"""
UNIFIED_CTX, SEPARATE_CTX = 4096, 1024
"""`n_ctx` of each slot of the recorded servers, which both have a KV cache for 4,096 tokens."""

Attach = Callable[[str], SlotSource]


@pytest.fixture
def attach(server: LlamaServer) -> Iterator[Attach]:
    """Function that watches the server: `attach(options of the address)`."""
    sources: list[SlotSource] = []

    def start(options: str = "") -> SlotSource:
        address = ExternalAddress.parse(f"llama://127.0.0.1:{server.server_address[1]}/{options}")
        sources.append(SlotSource(address, every_s=0.01))
        return sources[-1]

    yield start
    for source in sources:
        source.close()


def capacity(source: SlotSource) -> int:
    hello = source.mirror.hello
    assert hello is not None
    return hello.cache.num_blocks * hello.cache.block_size


@pytest.mark.parametrize(
    ("n_ctx", "options", "tokens", "layout"),
    [
        (UNIFIED_CTX, "", 4096, "4 slots, unified, assumed"),
        (UNIFIED_CTX, "?kv_unified=1", 4096, "4 slots, unified"),
        (SEPARATE_CTX, "?kv_unified=0", 4096, "4 slots"),
    ],
)
def test_capacity_of_four_slots_is_that_of_the_kv_cache(
    n_ctx: int, options: str, tokens: int, layout: str, server: LlamaServer, attach: Attach
) -> None:
    server.slots = json.loads(RECORDED_SLOTS % {"n_ctx": n_ctx})
    source = attach(options)
    wait_for_poll(source, server)
    mirror = source.mirror
    assert mirror.hello is not None
    assert (capacity(source), mirror.hello.cache.allocator, mirror.hello.model.max_model_len) == (tokens, layout, n_ctx)
    assert (mirror.num_cached, int(mirror.ledger.filled.sum())) == (2, 48)
    assert ("?kv_unified=0" in source.status.reason) == (not options)


def test_two_slots_are_assumed_to_have_separate_caches(server: LlamaServer, attach: Attach) -> None:
    source = attach("")
    wait_for_poll(source, server)
    assert capacity(source) == 2 * 7 * 32
    assert "?kv_unified=1" in source.status.reason


def test_four_slots_that_hold_more_than_one_may_do_not_share_a_cache(server: LlamaServer, attach: Attach) -> None:
    server.slots = json.loads(RECORDED_SLOTS % {"n_ctx": SEPARATE_CTX})
    source = attach("")
    wait_for_poll(source, server)
    assert capacity(source) == 1024, "assumed"
    server.slots = [each | {"id_task": 7, "n_prompt_tokens": 600} for each in server.slots]
    wait_for(lambda: source.update_mirror() is not None and capacity(source) == 4096)
    server.slots = [each | {"n_prompt_tokens": 10} for each in server.slots]
    wait_for_poll(source, server)
    assert capacity(source) == 4096, "and stays so for this server process"


def test_slots_of_a_unified_cache_use_each_others_freed_rows(server: LlamaServer, attach: Attach) -> None:
    def hold(*tokens: int) -> None:
        server.slots = [
            {"id": n, "n_ctx": 128, "is_processing": False, "id_task": n, "n_prompt_tokens": held}
            for n, held in enumerate(tokens)
        ]

    hold(100, 0)
    source = attach("?kv_unified=1")
    wait_for_poll(source, server)
    ledger = source.mirror.ledger
    assert (ledger.state == BlockState.CACHED).tolist() == [True, True, True, True]
    hold(0, 70)
    wait_for_poll(source, server)
    ledger = source.mirror.ledger
    assert sorted(ledger.filled.tolist()) == [0, 6, 32, 32]
    assert int((ledger.state == BlockState.FREE).sum()) == 1


def test_cells_without_a_row_in_a_full_unified_cache_are_left_out() -> None:
    rows = SlotRows(3, 96, is_unified=True)
    for slot, tokens in enumerate((40, 40, 16)):
        rows.grow(slot, tokens)
    assert [len(rows.of_slot(slot)) for slot in range(3)] == [2, 1, 0]
    assert rows.shrink(0, 10) == [1]
    rows.grow(2, 16)
    assert rows.of_slot(2) == [1]


@pytest.mark.parametrize("address", ["llama://h:1/?kv_unified=2", "vllm://h:1/?kv_unified=1"])
def test_invalid_kv_unified_option_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match=r"kv_unified='.' is not accepted"):
        ExternalAddress.parse(address)
