"""Log of blocks that entered or left the prefix cache since the last `drain`, as KV events in order.

Decides how changes of blocks are grouped: consecutive blocks of one text form one event. Independent of block ids and
of the readers of the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscope_engine.policy.prefixes.prefix_index import DIGEST_BYTES, Prefix, published_hash
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvscope_telemetry.kv_events.encoding import pack_extra_keys
from kvscope_telemetry.ledger import Tier

MEDIA: Final = {Tier.HBM: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
"""vLLM's names for the tiers of blocks; the device tier is `GPU` even on a CPU."""


class CacheLog:
    """Collects the KV events of a cache with blocks of `block_size` tokens.

    With several KV groups (`has_groups`), each event belongs to one group; the hash of a block is the same in all
    groups.
    """

    def __init__(self, block_size: int) -> None:
        self.has_groups = False
        self._block_size = block_size
        self._events: list[KvEvent] = []
        self._pending_run: list[Prefix] = []
        self._pending_tier = Tier.HBM

    def record_stored(self, prefix: Prefix, tier: Tier = Tier.HBM) -> None:
        if self._pending_run and (tier != self._pending_tier or prefix.parent != self._pending_run[-1].digest):
            self._flush_run()
        self._pending_run.append(prefix)
        self._pending_tier = tier

    def record_removed(self, prefixes: Iterable[Prefix], tier: Tier = Tier.HBM) -> None:
        by_group: dict[int, list[Prefix]] = {}
        for prefix in prefixes:
            by_group.setdefault(prefix.group, []).append(prefix)
        for group, removed in by_group.items():
            self._flush_run()
            hashes = tuple([_block_hash(prefix.digest) for prefix in removed])
            self._events.append(BlockRemoved(hashes, MEDIA[tier], group_idx=self._published_group(group)))

    def record_cleared(self) -> None:
        self._flush_run()
        self._events.append(AllBlocksCleared())

    def drain(self) -> list[KvEvent]:
        self._flush_run()
        events, self._events = self._events, []
        return events

    def _published_group(self, group: int) -> int | None:
        return group if self.has_groups else None

    def _flush_run(self) -> None:
        if not self._pending_run:
            return
        run, self._pending_run = self._pending_run, []
        self._events.append(
            BlockStored(
                tuple([_block_hash(prefix.digest) for prefix in run]),
                _block_hash(run[0].parent) if run[0].parent else None,
                tuple([token for prefix in run for token in prefix.token_ids]),
                self._block_size,
                medium=MEDIA[self._pending_tier],
                lora_name=run[0].adapter or None,
                group_idx=self._published_group(run[0].group),
                extra_keys=_extra_keys(run),
            )
        )


def _block_hash(digest: bytes) -> int:
    """Return the 64-bit hash that is published for a digest, without the KV group, as in vLLM."""
    return published_hash(digest[:DIGEST_BYTES])


def _extra_keys(run: list[Prefix]) -> bytes | None:
    """Return vLLM's `extra_keys`: an adapter's name for every block, a salt only for a text's first block."""
    keys = [tuple(filter(None, (prefix.adapter, prefix.salt))) or None for prefix in run]
    return pack_extra_keys(tuple(keys)) if any(keys) else None
