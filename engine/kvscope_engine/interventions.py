"""Manual interventions between two steps: preempt, pin, evict, change limits, load LoRA adapters.

Methods return a one-line description of the change, and raise BadInput with the reason if nothing was changed. Must not
depend on clients or on which client pinned a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvscope_engine.policy.adapter import NO_UPDATING
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import LoadedAdapter
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.pins import MAX_PINNED, refusal_of_many
from kvscope_telemetry.plural import counted

if TYPE_CHECKING:
    from kvscope_engine.model.layers.lora.lora_adapters import LoraAdapters


class Interventions:
    """Executes manual interventions on one engine's block pool, scheduler and LoRA adapters.

    Args:
        pool: The engine's block pool.
        scheduler: The engine's scheduler.
        record: Publishes changes that were made without a step.
        finish_in_flight: Completes the step in flight.
        lora: The engine's LoRA adapters; None if it has none.
    """

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        record: Callable[[], None],
        finish_in_flight: Callable[[], None] = lambda: None,
        lora: LoraAdapters | None = None,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._record = record
        self._finish_in_flight = finish_in_flight
        self._lora = lora
        self._max_limits = (scheduler.limits.max_num_seqs, scheduler.limits.max_num_batched_tokens)

    @property
    def limits(self) -> tuple[int, int]:
        """Current `max_num_seqs` and `max_num_batched_tokens`."""
        return self._scheduler.limits.max_num_seqs, self._scheduler.limits.max_num_batched_tokens

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        return () if self._lora is None else self._lora.loaded

    @property
    def can_update_adapters(self) -> bool:
        """Whether `load_adapter` and `unload_adapter` are enabled."""
        return self._lora is not None and self._lora.can_update

    @property
    def pinned(self) -> list[int]:
        """Ids of the pinned blocks, ascending."""
        return sorted(self._pool.pinned)

    def preempt(self, number: int, how: str, by: str) -> str:
        """Preempt a running request. `how`: "swap", "recompute", or "" to let the engine choose."""
        self._finish_in_flight()
        request = self._running_request(number)
        if how == "swap" and not self._pool.num_host:
            raise BadInput(f"request {number} cannot be swapped out: this engine has no lower tier to swap to")
        record = self._scheduler.preempt(request, how, by, time.monotonic_ns())
        if record is None:
            raise BadInput(
                f"request {number} was not swapped out: nothing is computed, or the lower tiers have no room"
            )
        self._record()
        outcome = "moved to a lower tier" if record.is_swapped else "to be computed again"
        moved = f"{counted(record.num_tokens, 'token')} in {counted(record.num_blocks, 'block')}"
        return f"request {number} was preempted: {moved} {outcome}"

    def pin(self, blocks: Sequence[int], by: str, *, with_prefix: bool) -> list[int]:
        """Protect cached blocks from eviction; with `with_prefix`, also the earlier blocks of their prefixes.

        Returns the ids of the protected blocks, including those that were already pinned.
        """
        requested = self._unique_blocks(blocks)
        if self._pool.index is None:
            raise BadInput("this engine has no prefix cache, so nothing can be pinned")
        if with_prefix:
            requested = list(dict.fromkeys(ancestor for block in requested for ancestor in self._prefix_of(block)))
        pinnable = [block for block in requested if self._pool.prefix(block) is not None]
        if not pinnable:
            raise BadInput(f"{_blocks_text(requested)} not in the prefix cache: only full, cached blocks can be pinned")
        if len(self._pool.pinned | set(pinnable)) > MAX_PINNED:
            raise BadInput(refusal_of_many(len(pinnable)))
        self._scheduler.pin(pinnable)
        self._record_notice(f"{by} pinned {counted(len(pinnable), 'block')}")
        return pinnable

    def unpin(self, blocks: Sequence[int], by: str) -> None:
        unpinned = [block for block in blocks if block in self._pool.pinned]
        self._pool.unpin(unpinned)
        if unpinned:
            self._record_notice(f"{counted(len(unpinned), 'block')} pinned by {by} may be evicted again")

    def evict(self, blocks: Sequence[int], by: str) -> str:
        """Evict the blocks among `blocks` that are cached, unused and not pinned."""
        requested = self._unique_blocks(blocks)
        evictable = [block for block in requested if self._pool.is_evictable(block)]
        if not evictable:
            raise BadInput(self._why_not_evicted(requested))
        num_offloaded = self._scheduler.evict(evictable, by, time.monotonic_ns())
        self._record()
        parts = [counted(len(evictable), "block") + (" was" if len(evictable) == 1 else " were") + " evicted"]
        parts += [f"{num_offloaded} moved to host memory"] if num_offloaded else []
        num_left = len(requested) - len(evictable)
        parts += [f"{num_left} others are in use, pinned or free"] if num_left else []
        return "; ".join(parts)

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int, by: str) -> str:
        """Change the scheduler's limits from the next step on; 0 leaves a limit unchanged."""
        current = self.limits
        new_limits = (max_num_seqs or current[0], max_num_batched_tokens or current[1])
        for name, value, maximum in zip(
            ("max_num_seqs", "max_num_batched_tokens"), new_limits, self._max_limits, strict=True
        ):
            if value > maximum:
                raise BadInput(
                    f"{name}={value} is not accepted: must be 1 to {maximum}, this engine's limit at its start"
                )
        self._scheduler.limits.set(*new_limits)
        text = f"max_num_seqs is {new_limits[0]}, max_num_batched_tokens {new_limits[1]}"
        self._record_notice(f"{by} changed the limits of the batch: {text}")
        running = self._scheduler.num_running
        return text + (f"; {running} run and end first" if running > new_limits[0] else "")

    def load_adapter(self, name: str, path: str, by: str) -> str:
        self._adapters_or_refuse().load(name, path)
        self._release_unused_adapters()
        text = f"LoRA adapter {name!r} was loaded from {path!r}"
        self._record_notice(f"{text} by {by}")
        return text

    def unload_adapter(self, name: str, by: str) -> str:
        """Unload a LoRA adapter. Unfinished requests that use the adapter continue."""
        self._adapters_or_refuse().unload(name)
        self._release_unused_adapters()
        requests = self._scheduler.requests.values()
        num_left = sum(request.adapter is not None and request.adapter.name == name for request in requests)
        text = f"LoRA adapter {name!r} was unloaded"
        self._record_notice(f"{text} by {by}")
        return text + (f"; {num_left} requests that have it go on" if num_left else "")

    def _adapters_or_refuse(self) -> LoraAdapters:
        if self._lora is None:
            raise BadInput(NO_UPDATING)
        return self._lora

    def _release_unused_adapters(self) -> None:
        if self._lora is not None:
            self._lora.release_unused(request.adapter for request in self._scheduler.requests.values())

    def _running_request(self, number: int) -> Request:
        request = self._scheduler.requests.get(number)
        if request is None:
            raise BadInput(f"request {number} has ended or does not exist")
        if request.state is not RequestState.RUNNING:
            raise BadInput(f"request {number} is waiting: only running requests have blocks to give up")
        return request

    def _unique_blocks(self, blocks: Sequence[int]) -> list[int]:
        unique = list(dict.fromkeys(blocks))
        if not unique:
            raise BadInput("no block was named: at least 1 is needed")
        outside = [block for block in unique if block >= self._pool.num_blocks]
        if outside:
            raise BadInput(f"block {outside[0]} is not in the pool: 0 to {self._pool.num_blocks - 1} are accepted")
        return unique

    def _prefix_of(self, block: int) -> list[int]:
        """Return a block and the cached blocks before it in its prefix, last to first."""
        chain, index = [block], self._pool.index
        prefix = self._pool.prefix(block)
        while index is not None and prefix is not None and prefix.parent:
            previous = index.get(prefix.parent)
            if previous is None:
                break
            chain.append(previous)
            prefix = self._pool.prefix(previous)
        return chain

    def _why_not_evicted(self, blocks: list[int]) -> str:
        pinned = sum(block in self._pool.pinned for block in blocks)
        if pinned:
            return f"{_blocks_text(blocks)} pinned: unpin first"
        if any(self._pool.ref_count(block) for block in blocks):
            return f"{_blocks_text(blocks)} in use: only cached blocks that no request holds can be evicted"
        return f"{_blocks_text(blocks)} not cached: there is nothing to evict"

    def _record_notice(self, text: str) -> None:
        self._scheduler.changes.record_notice(text, time.monotonic_ns())
        self._record()


def _blocks_text(blocks: list[int]) -> str:
    return f"block {blocks[0]} is" if len(blocks) == 1 else f"these {len(blocks)} blocks are"
