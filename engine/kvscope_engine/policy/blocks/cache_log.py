"""Logs what entered and left the prefix cache since the last call, as KV events, in order.

Owns how changes of blocks become events: consecutive blocks of one text are one event. Knows prefixes, and neither
blocks nor who reads this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscope_engine.policy.prefixes.prefix_index import Prefix, published_hash
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvscope_telemetry.kv_events.encoding import pack_extra_keys
from kvscope_telemetry.ledger import Tier

MEDIA: Final = {Tier.HBM: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
"""vLLM's words for where a block is; the device is `GPU` whatever it is."""


class CacheLog:
    """For a cache with blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KvEvent] = []
        self._run: list[Prefix] = []
        self._run_tier = Tier.HBM

    def stored(self, prefix: Prefix, tier: Tier = Tier.HBM) -> None:
        """It can be found in `tier` from now on."""
        if self._run and (tier != self._run_tier or prefix.parent != self._run[-1].digest):
            self._end_run()
        self._run.append(prefix)
        self._run_tier = tier

    def removed(self, prefixes: Iterable[Prefix], tier: Tier = Tier.HBM) -> None:
        """They can no longer be found in `tier`."""
        hashes = tuple([published_hash(prefix.digest) for prefix in prefixes])
        if hashes:
            self._end_run()
            self._events.append(BlockRemoved(hashes, MEDIA[tier]))

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self._end_run()
        self._events.append(AllBlocksCleared())

    def drain(self) -> list[KvEvent]:
        """What happened since the last call."""
        self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        if not self._run:
            return
        run, self._run = self._run, []
        self._events.append(
            BlockStored(
                tuple([published_hash(prefix.digest) for prefix in run]),
                run[0].published_parent or None,
                tuple([token for prefix in run for token in prefix.token_ids]),
                self._block_size,
                medium=MEDIA[self._run_tier],
                lora_name=run[0].adapter or None,
                extra_keys=_extra_keys(run),
            )
        )


def _extra_keys(run: list[Prefix]) -> bytes | None:
    """As vLLM has them: an adapter's name is a key of every block, a salt of a text's first block and of no other."""
    keys = [tuple(filter(None, (prefix.adapter, prefix.salt))) or None for prefix in run]
    return pack_extra_keys(tuple(keys)) if any(keys) else None
