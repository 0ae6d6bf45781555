"""KV groups as reported by events: their numbers, sizes and kinds, and the chunks of external stores."""

from __future__ import annotations

from kvscope_telemetry.collectors.kv_groups import Groups
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE, MAX_GROUPS


def stored(
    index: int | None, size: int = 16, kind: str | None = None, window: int | None = None, medium: str | None = "GPU"
) -> BlockStored:
    return BlockStored(
        (1,),
        None,
        (),
        size,
        medium=medium,
        group_idx=index,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def test_single_group_is_not_reported() -> None:
    groups = Groups()
    assert (groups.block_size, groups.published(16)) == (0, ())
    assert groups.number_of(stored(None)) == 0
    assert (groups.block_size, groups.published(16)) == (16, ())


def test_kv_groups_keep_their_numbers_and_full_attention_sets_the_block_size() -> None:
    groups = Groups()
    runs = (stored(1, 64, "sliding_window", 512), stored(0, 32, "full_attention"), stored(2, 256, "mamba"))
    assert [groups.number_of(run) for run in (*runs, *runs)] == [0, 1, 2, 0, 1, 2]
    assert groups.block_size == 32
    assert groups.published(32) == (
        KVGroup(kind="window", block_size=64, window=512),
        KVGroup(kind="full", block_size=32),
        KVGroup(kind="state", block_size=256),
    )
    assert groups.sizes.tolist() == [64, 32, 256]


def test_chunks_of_an_external_kv_store_form_a_separate_kv_group() -> None:
    groups = Groups()
    chunk, block = stored(None, 256, medium="cpu"), stored(0, 16, "full_attention")
    assert groups.number_of(chunk) == 0
    assert groups.block_size == 0
    assert groups.published(16) == (KVGroup(kind="", block_size=256),)
    assert groups.number_of(block) == 1
    assert groups.block_size == 16
    assert [group.kind for group in groups.published(16)] == ["chunks", "full"]


def test_kv_event_without_a_group_belongs_to_the_group_of_its_block_size() -> None:
    groups = Groups()
    assert groups.number_of(stored(None, medium="cpu")) == 0
    assert groups.number_of(stored(0, kind="full_attention")) == 0
    assert groups.number_of(stored(1, kind="sliding_window", window=8)) == 1
    assert groups.number_of(stored(None, medium="cpu")) == 0


def test_unknown_groups_are_bounded() -> None:
    groups = Groups()
    numbers = [groups.number_of(stored(index, 1 << 20, "x" * 100)) for index in range(MAX_GROUPS + 10)]
    assert numbers[-12:] == [MAX_GROUPS - 2] + [MAX_GROUPS - 1] * 11
    told = groups.published(16)
    assert len(told) == MAX_GROUPS
    assert (told[0].block_size, len(told[0].kind)) == (MAX_BLOCK_SIZE, 40)
