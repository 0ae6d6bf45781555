"""The KV groups of another engine, as its KV events tell of them: kind, window and block size of each.

A group is what events number (`group_idx`) together with the size of its blocks: what is told of in another size beside
them (LMCache's chunks of 256 tokens beside blocks of 16) is a group of its own here, so that each row has its size.
Groups have numbers in the order in which they were first told of, and keep them. Knows no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.external.tiers import tier_of
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE, MAX_GROUPS

MAX_KIND_LETTERS: Final = 40
_KINDS: Final = {
    "full_attention": "full",
    "sink_full_attention": "full",
    "mla_attention": "latent",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "chunked",
    "cross_attention": "cross",
    "mamba": "state",
}
"""vLLM's words, and `KVGroup.kind`'s."""


@dataclass(slots=True)
class _Group:
    index: int | None
    """The number that events have for it."""
    size: int
    kind: str = ""
    window: int = 0
    is_on_device: bool = False


class Groups:
    """Ask `number_of` each stored run."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._numbers: dict[tuple[int | None, int], int] = {}

    def number_of(self, run: BlockStored) -> int:
        """The group of its blocks; runs of more groups than there may be are of the last."""
        key = (run.group_idx, run.block_size)
        number = self._numbers.get(key)
        if number is None:
            number = self._new_number(run.group_idx, min(max(run.block_size, 1), MAX_BLOCK_SIZE))
            if number == MAX_GROUPS:
                return MAX_GROUPS - 1
            self._numbers[key] = number
        group = self._groups[number]
        if run.kv_cache_spec_kind and not group.kind:
            group.kind = _KINDS.get(run.kv_cache_spec_kind, run.kv_cache_spec_kind[:MAX_KIND_LETTERS])
            group.window = max(run.kv_cache_spec_sliding_window or 0, 0)
        if not group.is_on_device:
            group.is_on_device = tier_of(run.medium) is Tier.HBM
        return number

    def _new_number(self, index: int | None, size: int) -> int:
        """Who does not number groups, as stores beside an engine, means the first that has blocks of this size."""
        for number, group in enumerate(self._groups):
            if group.size == size and None in (index, group.index):
                group.index = index if group.index is None else group.index
                return number
        if len(self._groups) < MAX_GROUPS:
            self._groups.append(_Group(index, size))
            return len(self._groups) - 1
        return MAX_GROUPS

    @property
    def sizes(self) -> npt.NDArray[np.uint16]:
        """Tokens of a block, by number of the group."""
        return np.array([group.size for group in self._groups] or [1], np.uint16)

    @property
    def block_size(self) -> int:
        """Of the device's blocks: those of full attention, where there are several kinds; 0 where none is told of."""
        of_device = [group for group in self._groups if group.is_on_device]
        first = next((group for group in of_device if group.kind in ("full", "latent", "indexed")), None)
        return first.size if first else of_device[0].size if of_device else 0

    def told(self, block_size: int) -> tuple[KVGroup, ...]:
        """As `CacheInfo.groups` has them; none where there is but one, of blocks of `block_size`."""
        if [group.size for group in self._groups] in ([], [block_size]):
            return ()
        has_device = any(group.is_on_device for group in self._groups)
        return tuple(
            KVGroup(
                kind=group.kind or ("" if group.is_on_device or not has_device else "chunks"),
                block_size=group.size,
                window=group.window,
            )
            for group in self._groups
        )
