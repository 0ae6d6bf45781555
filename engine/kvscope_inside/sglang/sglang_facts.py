"""Builds the `Hello` message of an SGLang scheduler from its configuration: model, pools, device, rank.

Only reads SGLang's objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvscope_inside.endpoints import api_of
from kvscope_inside.host_facts import device_info, dtype_name, model_info
from kvscope_inside.latents import expanded_times
from kvscope_inside.sglang.pools import Pools, pools_of
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, Hello, KVGroup, ModelInfo
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE
from kvscope_telemetry.transport.host_id import host_id


class SchedulerRank(NamedTuple):
    data_parallel: int
    is_first: bool
    """Whether this is the first of the ranks that run parts of the same model in lockstep."""
    num_ranks: int
    """Number of processes among which the model is partitioned."""


def drafts_per_step(scheduler: Any) -> int:
    """Return the number of draft tokens per request and step; 0 without speculative decoding, or if the number
    varies.
    """
    args = scheduler.server_args
    is_steady = getattr(args, "speculative_algorithm", None) and not getattr(args, "speculative_adaptive", False)
    return max(0, int(getattr(args, "speculative_num_draft_tokens", 0) or 0) - 1) if is_steady else 0


def adapter_names(scheduler: Any) -> Callable[[str], str | None]:
    """Return a function that maps SGLang's adapter id to the adapter's name, or to None if unknown."""
    resolve = getattr(getattr(scheduler, "kv_event_lora_names", None), "resolve", None)
    names = {each.lora_id: each.lora_name for each in getattr(scheduler.server_args, "lora_paths", None) or ()}
    return lambda adapter: names.get(adapter) or (resolve(adapter) if resolve is not None else None)


def rank_of(scheduler: Any) -> SchedulerRank:
    from sglang.srt.runtime_context import get_parallel

    parallel, args = get_parallel(), scheduler.server_args
    pipeline, tensor, context, data = (
        _number(parallel, name) for name in ("pp_rank", "attn_tp_rank", "attn_cp_rank", "dp_rank")
    )
    return SchedulerRank(data, not (pipeline or tensor or context), int(args.tp_size) * int(args.pp_size))


def _number(parallel: Any, name: str) -> int:
    """Return the rank in the attribute `name`; 0 if the run has no such parallelism."""
    try:
        return int(getattr(parallel, name) or 0)
    except Exception:  # SGLang raises various errors for names that this run lacks
        return 0


def hello_of(scheduler: Any, epoch: int, *, num_ranks: int = 1, has_free_list: bool = True) -> Hello:
    """Return the `Hello` message for the scheduler's pools. The first ledger row is the page to which padding
    is written.
    """
    pools = pools_of(scheduler)
    groups = _groups(scheduler, pools)
    api = api_of("sglang", engine_address=_api_description(scheduler.server_args))
    return Hello(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=_model(scheduler),
        cache=CacheInfo(
            num_blocks=pools.num_blocks,
            block_size=pools.page_size,
            block_bytes=_page_bytes(pools) // max(1, pools.num_blocks - 1),
            dtype=dtype_name(getattr(pools.full, "dtype", "")),
            prefix_caching=not getattr(scheduler.tree_cache, "disable", False),
            max_num_seqs=int(scheduler.max_running_requests),
            max_num_batched_tokens=int(getattr(scheduler, "chunked_prefill_size", 0) or scheduler.max_prefill_tokens),
            has_parents=True,
            num_reserved_blocks=1,
            num_host_blocks=pools.num_host_pages,
            num_states=pools.states.num_states if pools.states is not None else 0,
            groups=groups,
            pool_tokens=pools.num_pages * pools.page_size if len(groups) > 1 else 0,
        ),
        device=device_info(str(scheduler.device)),
        engine_version=f"SGLang {_version()}",
        pid=os.getpid(),
        host=host_id(),
        capabilities=Capabilities(
            engine="sglang",
            completions=bool(api),
            aborts=True,
            allocator_map=False,
            free_rows=has_free_list,
            groups=len(groups) > 1,
            prompt_estimates=bool(api),
        ),
        num_ranks=num_ranks,
        api=api,
    )


def kv_bytes(pools: Pools) -> int:
    """Return the bytes of all pages and recurrent states, summed over all layers; 0 if unknown."""
    num_bytes = _page_bytes(pools)
    return num_bytes + _state_bytes(pools) if num_bytes else 0


def _page_bytes(pools: Pools) -> int:
    parts = [_bytes_of(pools.full)]
    parts += [_bytes_of(pools.windows.allocator)] if pools.windows is not None else []
    return sum(parts) if all(parts) else 0


def _api_description(args: Any) -> str:
    """Return the address http://HOST:PORT of SGLang's server; empty if it has none."""
    host, port = getattr(args, "host", ""), getattr(args, "port", 0)
    scheme = "https" if getattr(args, "ssl_keyfile", None) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" if host and port else ""


def _bytes_of(allocator: Any) -> int:
    get_bytes = getattr(_pool_of(allocator), "get_kv_size_bytes", None)
    if get_bytes is None:
        return 0
    sizes = get_bytes()
    return sum(map(int, sizes)) if isinstance(sizes, tuple) else int(sizes)


def _pool_of(allocator: Any) -> Any:
    """Return the KV pool of an allocator. In a hybrid model, the pool is a part of the KV cache that the
    allocator's `get_kvcache` returns.
    """
    pool = allocator.get_kvcache()
    return getattr(pool, "full_kv_pool", pool)


def _state_bytes(pools: Pools) -> int:
    get_bytes = getattr(getattr(pools.states and pools.states.table, "mamba_pool", None), "get_kv_size_bytes", None)
    return int(get_bytes()) if get_bytes is not None else 0


def _groups(scheduler: Any, pools: Pools) -> tuple[KVGroup, ...]:
    """Return the KV groups; empty if the model has only full attention."""
    is_latent = "MLA" in type(_pool_of(pools.full)).__name__
    if pools.windows is None and pools.states is None and not is_latent:
        return ()
    first = _pages_group("latent" if is_latent else "full", pools.full, pools.num_pages, pools.page_size)
    if is_latent:
        ranks = int(getattr(scheduler.server_args, "tp_size", 1) or 1)
        times = expanded_times(getattr(scheduler.model_config, "hf_text_config", None), ranks)
        first = msgspec.structs.replace(first, expanded_bytes=round(times * first.block_bytes))
    groups = [first]
    if (windows := pools.windows) is not None:
        pages = _pages_group("window", windows.allocator, windows.num_pages, pools.page_size)
        groups.append(msgspec.structs.replace(pages, window=windows.num_tokens))
    if (states := pools.states) is not None:
        layers = len(getattr(states.table, "mamba_map", ()))
        size = min(int(scheduler.model_config.context_len), MAX_BLOCK_SIZE)
        num_bytes = _state_bytes(pools) // max(1, states.num_states)
        groups.append(
            KVGroup(
                kind="state",
                num_layers=layers,
                block_size=size,
                block_bytes=num_bytes,
                num_blocks=states.num_states,
            )
        )
    return tuple(groups)


def _pages_group(kind: str, allocator: Any, num_pages: int, page_size: int) -> KVGroup:
    return KVGroup(
        kind=kind,
        num_layers=int(getattr(_pool_of(allocator), "layer_num", 0) or 0),
        block_size=page_size,
        block_bytes=_bytes_of(allocator) // max(1, num_pages),
        num_blocks=num_pages,
    )


def _model(scheduler: Any) -> ModelInfo:
    config, args = scheduler.model_config, scheduler.server_args
    name, path = str(args.served_model_name or args.model_path), str(args.model_path)
    return model_info(
        config.hf_config,
        getattr(config, "hf_text_config", None),
        name=Path(path).name if name in ("default", path) else name,
        dtype=dtype_name(config.dtype),
        head_dim=int(getattr(config, "head_dim", 0) or 0),
        max_model_len=int(config.context_len),
        quantization=str(getattr(config, "quantization", None) or ""),
    )


def _version() -> str:
    import sglang

    return str(sglang.__version__)
