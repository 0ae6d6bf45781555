"""Finds vLLM's OffloadingConnector on the scheduler's side, and records the blocks that it stores in host memory.

Supports the objects of several versions of vLLM. A slot is the unit that vLLM's manager allocates: one block of the
pool, or a chunk of several blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_inside.vllm.second_pool import SecondPool, second_pool_of
from kvscope_telemetry.messages.validity import MAX_BLOCKS

_METHODS: Final = ("prepare_store", "complete_store", "prepare_load", "complete_load")


class Offloading(NamedTuple):
    side: Any
    """The connector's scheduler-side object (`connector_scheduler`)."""
    manager: Any
    num_slots: int
    blocks_per_slot: int

    @property
    def num_blocks(self) -> int:
        return self.num_slots * self.blocks_per_slot


def offloading_of(scheduler: Any) -> Offloading | None:
    """Return the scheduler's offloading tier in host memory; None if it has none, or if its structure is unknown."""
    for connector in _connectors(getattr(scheduler, "connector", None)):
        side = getattr(connector, "connector_scheduler", None)
        manager = _host_memory_manager(getattr(side, "manager", None))
        offloading = Offloading(side, manager, _num_slots(manager), _blocks_per_slot(getattr(side, "config", None)))
        if all(hasattr(manager, name) for name in _METHODS) and 0 < offloading.num_blocks <= MAX_BLOCKS:
            return offloading
    return None


def second_pool(scheduler: Any) -> SecondPool | None:
    """Return the second pool of the scheduler's connectors; None if they have none, or if the offloading tier
    is published instead.
    """
    if offloading_of(scheduler) is not None:
        return None
    return second_pool_of(_connectors(getattr(scheduler, "connector", None)))


def unpublished_connectors(scheduler: Any) -> str:
    """Return a line that names the connectors whose blocks are not published; empty if there are none."""
    offloading, second = offloading_of(scheduler), second_pool(scheduler)
    names = []
    for connector in _connectors(getattr(scheduler, "connector", None)):
        manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
        lower_tiers = [type(tier).__name__ for tier in getattr(manager, "secondary_tiers", None) or ()]
        is_published = offloading is not None and _host_memory_manager(manager) is offloading.manager
        if second is not None and second_pool_of([connector]) == second:
            continue
        names += lower_tiers if is_published else [type(connector).__name__]
    return f"blocks that {', '.join(names)} may keep outside the pool are not shown" if names else ""


def hook_offloading(hooks: Hooks, offloading: Offloading, record_event: Callable[..., None]) -> None:
    """Install hooks on the offloading tier. They call `record_event` with an event's kind and arguments, on the
    engine core's thread.
    """

    def on_store(result: Any, keys: Any, context: Any = None, *_: Any, **kwargs: Any) -> None:
        if result is not None and result.keys_to_store:
            request_id = getattr(kwargs.get("req_context", context), "req_id", "")
            slots = result.store_spec.block_ids
            record_event("stores", tuple(result.keys_to_store), slots, tuple(result.evicted_keys), request_id)

    def on_stored(result: Any, keys: Iterable[bytes], *flags: Any, success: bool = True, **_: Any) -> None:
        record_event("stored", tuple(keys), success and not any(each is False for each in flags))

    def on_load(result: Any, *_: Any, **__: Any) -> None:
        record_event("reads", result.block_ids)

    def on_loaded(keys: Iterable[bytes], *_: Any, **__: Any) -> None:
        record_event("was read", tuple(keys))

    def on_metadata(result: Any, *_: Any, **__: Any) -> None:
        for job in getattr(result, "store_jobs", {}).values():
            starts = [start % offloading.blocks_per_slot for start in job.src_spec.block_indices]
            if any(starts):
                record_event("skips", job.dst_spec.block_ids, starts)

    manager = offloading.manager
    if offloading.blocks_per_slot > 1 and hasattr(offloading.side, "build_connector_meta"):
        hooks.after(offloading.side, "build_connector_meta", on_metadata)
    # Lower tiers call the same methods by other names.
    for name in _existing(manager, "prepare_store", "prepare_write"):
        hooks.after(manager, name, on_store)
    for name in _existing(manager, "complete_store", "complete_write"):
        hooks.after(manager, name, on_stored)
    for name in _existing(manager, "prepare_load", "prepare_read"):
        hooks.after(manager, name, on_load)
    for name in _existing(manager, "complete_load", "complete_read"):
        hooks.before(manager, name, on_loaded)
    for name in _existing(manager, "reset_cache"):
        hooks.after(manager, name, lambda *_, **__: record_event("emptied"))


def _existing(owner: Any, *names: str) -> list[str]:
    return [name for name in names if hasattr(owner, name)]


def _connectors(connector: Any) -> Iterator[Any]:
    """Yield the connectors within a MultiConnector, or the connector itself."""
    inner = getattr(connector, "_connectors", None)
    if inner:
        for each in inner:
            yield from _connectors(each)
    elif connector is not None:
        yield connector


def _host_memory_manager(manager: Any) -> Any:
    """Return the manager of host memory. It may be wrapped in managers that filter stores or add lower tiers."""
    for name in ("_backing", "primary_tier"):
        manager = getattr(manager, name, manager)
    return manager


def _num_slots(manager: Any) -> int:
    policy = getattr(manager, "_policy", None)
    names = ((manager, "_num_chunks"), (manager, "_num_blocks"), (policy, "cache_capacity"))
    return int(next((getattr(owner, name) for owner, name in names if hasattr(owner, name)), 0))


def _blocks_per_slot(config: Any) -> int:
    return int(getattr(config, "blocks_per_chunk", None) or getattr(config, "block_size_factor", None) or 1)
