"""Values derived from a CacheInfo."""

from __future__ import annotations

import pytest

from kvscope_telemetry.messages.telemetry import CacheInfo, KVGroup

FULL, WINDOW = KVGroup(kind="full"), KVGroup(kind="window", block_size=32)


@pytest.mark.parametrize(
    ("groups", "more", "smallest"),
    [
        ((), {}, 16),
        ((FULL, WINDOW), {}, 32),
        ((FULL, KVGroup(kind="cross", block_size=100)), {}, 16),
        ((FULL, KVGroup(kind="state", block_size=48)), {}, 48),
        ((FULL, WINDOW, KVGroup(kind="state", block_size=4096)), {"num_states": 8}, 32),
        ((FULL, KVGroup(kind="state", block_size=64)), {"hit_tokens": 16}, 16),
    ],
    ids=["one group", "two", "beside", "states in the pool's blocks", "states in slots of their own", "as it is told"],
)
def test_smallest_hit_is_a_multiple_of_the_block_sizes_of_all_groups(
    groups: tuple[KVGroup, ...], more: dict[str, int], smallest: int
) -> None:
    assert CacheInfo(num_blocks=4, block_size=16, groups=groups, **more).smallest_hit == smallest
