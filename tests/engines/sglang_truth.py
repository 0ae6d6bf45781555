"""Loaded by SGLang beside kvscope's plugin: whenever kvscope has looked at the pages, what SGLang's own objects say
then goes to a file, a line each, for `test_sglang.py` to compare with what was told."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def load() -> None:
    """Where `KVSCOPE_TRUTH` names a file."""
    if not os.environ.get("KVSCOPE_TRUTH"):
        return
    if os.environ.get("KVSCOPE_BREAKING"):
        from kvscope_inside.sglang.sglang_recorder import SglangRecorder

        break_hook(SglangRecorder, os.environ["KVSCOPE_BREAKING"])
    if os.environ.get("KVSCOPE_HICACHE"):
        transfers_that_only_take_their_time()
    if os.environ.get("KVSCOPE_WINDOWS"):
        read_windows_by_pages_of_full_attention()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", made, HookType.AFTER)


def made(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    from kvscope_inside.sglang import sglang_recorder
    from kvscope_inside.sglang.sglang_recorder import SglangRecorder

    path = Path(os.environ["KVSCOPE_TRUTH"])
    path.touch()
    note = SglangRecorder._record

    def noted(self: Any, *given: Any, **named: Any) -> None:
        note(self, *given, **named)
        last = self.records[-1] if self.records else None
        if last is not None and last.pages is not None and last.pages.is_whole:
            line = json.dumps(truth_of(scheduler) | {"time_ns": last.time_ns}) + "\n"
            with path.open("a") as file:
                file.write(line)

    SglangRecorder._record = noted
    sglang_recorder.COPIES_PER_S = int(os.environ.get("KVSCOPE_TRUTH_COPIES") or sglang_recorder.COPIES_PER_S)


def read_windows_by_pages_of_full_attention() -> None:
    """Attention of a CPU looks keys of windows up where those of full attention are: they are put there for it."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    for name in ("get_key_buffer", "get_value_buffer"):
        read = getattr(SWAKVPool, name)

        def in_order(self: Any, layer_id: int, read: Any = read) -> Any:
            buffer = read(self, layer_id)
            return buffer[self.full_to_swa_index_mapping[:-1]] if self.layers_mapping[layer_id][1] else buffer

        setattr(SWAKVPool, name, in_order)


class Event:
    """Of a device that is done a while after it was asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ends_s = 0.0

    def record(self, *_: Any) -> None:
        self.ends_s = time.monotonic() + 0.02

    def query(self) -> bool:
        return time.monotonic() >= self.ends_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.ends_s - time.monotonic()))

    def wait(self, *_: Any) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 20.0


class Stream:
    """Of the same."""

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def transfers_that_only_take_their_time() -> None:
    """HiCache copies between a GPU and the host alone: here all is kept in its books, and nothing is copied."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = SimpleNamespace(
        Event=Event, Stream=Stream, current_stream=lambda *_: Stream(), stream=lambda _: nullcontext(), __name__="none"
    )
    cache_controller.device_module = l2_transfer.device_module = device
    common._cuda_host_register = lambda *_, **__: None
    for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
        setattr(MHATokenToKVPoolHost, name, lambda *_, **__: None)
    l2_transfer.L2TransferEngine._record_stream = lambda *_, **__: None


def break_hook(kind: Any, name: str) -> None:
    """Have a hook of ours raise when it is called for the fifth time."""
    hook, calls = getattr(kind, name), 0

    def broken(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= 5:
            raise RuntimeError("broken by a test")
        return hook(*given, **named)

    setattr(kind, name, broken)


def truth_of(scheduler: Any) -> dict[str, Any]:
    """All that can be told, read from SGLang's own objects."""
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    allocator = getattr(allocator, "full_attn_allocator", allocator)  # of a model with windows, too
    size, table = allocator.page_size, scheduler.req_to_token_pool.req_to_token
    holders = {id(each): each for each in scheduler.collect_inflight_reqs()}
    batches = [scheduler.cur_batch_for_debug, scheduler.running_batch]
    holders |= {id(each): each for batch in batches if batch is not None for each in batch.reqs}
    if scheduler.chunked_req is not None:
        holders[id(scheduler.chunked_req)] = scheduler.chunked_req
    running = [each for each in holders.values() if each.kv.holds_kv]
    in_tree = cache.tree_core.all_values_flatten()
    return {
        **windows_of(scheduler),
        **host_tier_of(scheduler),
        "free": sorted(allocator.get_all_free_pages().tolist()),
        "num_pages": allocator.size // size,
        "page_size": size,
        "in_tree": sorted(set((in_tree // size).tolist())),
        "locked_tokens": cache.full_protected_size(),
        "tables": {
            each.rid: (table[each.kv.req_pool_idx, : each.kv.kv_allocated_len : size] // size).tolist()
            for each in running
        },
        "published": {each.rid: each.kv.cache_protected_len // size for each in running},
        "computed": {each.rid: each.kv.kv_committed_len for each in running},
        "outputs": {each.rid: len(each.output_ids) for each in running},
        "retractions": {each.rid: each.retraction_count for each in (*running, *scheduler.waiting_queue)},
        "waiting": [each.rid for each in scheduler.waiting_queue],
    }


def windows_of(scheduler: Any) -> dict[str, Any]:
    """The pool of sliding windows; nothing where there is none."""
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    own = getattr(allocator, "swa_attn_allocator", None)
    if own is None:
        return {}
    size = own.page_size
    return {
        "num_windows": own.size // size,
        "window": cache.swa_retain_window,
        "free_windows": sorted(own.get_all_free_pages().tolist()),
        "windows": (allocator.full_to_swa_index_mapping[:-1:size] // size).tolist(),
        "evictable_windows": cache.swa_evictable_size() // size,
        "locked_windows": cache.swa_protected_size() // size,
    }


def host_tier_of(scheduler: Any) -> dict[str, Any]:
    """What HiCache keeps in host memory; nothing without it."""
    cache = scheduler.tree_cache
    if cache.cache_controller is None:
        return {}
    pool = cache.cache_controller.mem_pool_host.anchor_entry.host_pool
    size = pool.page_size
    return {
        "num_host_pages": pool.size // size,
        "host_pages": (pool.slot_used.nonzero().flatten()[::size] // size).tolist(),
        "moving": len(cache.ongoing_write_through) + len(cache.ongoing_load_back),
    }
