"""What SGLang says of itself when its scheduler is made: the model, the pool of KV pages, the device, its rank.

Owns the words that are made of its configuration. Reads objects of SGLang and changes none.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvscope_inside.endpoints import api_of
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.sockets.host_id import host_id


class Rank(NamedTuple):
    """Which of SGLang's scheduler processes this is."""

    data_parallel: int
    is_first: bool
    """Of those that hold parts of one model and do the same."""
    num_ranks: int
    """Processes that the model is shared out among."""


def rank_of(scheduler: Any) -> Rank:
    """Of the process that it runs in."""
    from sglang.srt.runtime_context import get_parallel

    parallel, args = get_parallel(), scheduler.server_args
    pipeline, tensor, context, data = (
        _number(parallel, name) for name in ("pp_rank", "attn_tp_rank", "attn_cp_rank", "dp_rank")
    )
    return Rank(data, not (pipeline or tensor or context), int(args.tp_size) * int(args.pp_size))


def _number(parallel: Any, name: str) -> int:
    """Of a rank; 0 where there are no such ranks."""
    try:
        return int(getattr(parallel, name) or 0)
    except Exception:  # SGLang raises what it likes for names that this run has not
        return 0


def hello_of(scheduler: Any, epoch: int, *, num_ranks: int = 1, knows_free: bool = True) -> Hello:
    """Of the scheduler's pool. A row is a page; the first is where padding is written."""
    allocator = full_allocator(scheduler)
    page_size, num_pages = int(allocator.page_size), num_pages_of(scheduler)
    api = api_of("sglang", said=_said_of_api(scheduler.server_args))
    return Hello(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=_model(scheduler),
        cache=CacheInfo(
            num_blocks=num_pages + 1,
            block_size=page_size,
            block_bytes=kv_bytes(scheduler) // max(1, num_pages),
            dtype=_dtype(getattr(allocator, "dtype", "")),
            prefix_caching=not getattr(scheduler.tree_cache, "disable", False),
            max_num_seqs=int(scheduler.max_running_requests),
            max_num_batched_tokens=int(getattr(scheduler, "chunked_prefill_size", 0) or scheduler.max_prefill_tokens),
            has_parents=True,
            num_reserved_blocks=1,
        ),
        device=_device(str(scheduler.device)),
        engine_version=f"SGLang {_version()}",
        pid=os.getpid(),
        host=host_id(),
        capabilities=Capabilities(
            engine="sglang", completions=bool(api), aborts=True, allocator_map=False, free_rows=knows_free
        ),
        num_ranks=num_ranks,
        api=api,
    )


def _said_of_api(args: Any) -> str:
    """http://HOST:PORT of its server; empty: it has none."""
    host, port = getattr(args, "host", ""), getattr(args, "port", 0)
    scheme = "https" if getattr(args, "ssl_keyfile", None) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" if host and port else ""


def full_allocator(scheduler: Any) -> Any:
    """Of the pages that full attention has; windows have another pool, of which nothing is told."""
    allocator = scheduler.token_to_kv_pool_allocator
    return getattr(allocator, "full_attn_allocator", allocator)


def num_pages_of(scheduler: Any) -> int:
    """Without the first, which is nobody's."""
    allocator = full_allocator(scheduler)
    return int(getattr(allocator, "num_pages", 0) or int(allocator.size) // int(allocator.page_size))


def kv_bytes(scheduler: Any) -> int:
    """Of all pages, over all layers, keys and values; 0: unknown."""
    pool = full_allocator(scheduler).get_kvcache()
    read = getattr(pool, "get_kv_size_bytes", None)
    if read is None:
        return 0
    said = read()
    return sum(map(int, said)) if isinstance(said, tuple) else int(said)


def weights_bytes(scheduler: Any) -> int:
    """Of the model's parameters and buffers on this rank, each once; 0: it does not show them."""
    model = scheduler.tp_worker.model_runner.model
    found = {each.data_ptr(): int(each.nbytes) for each in (*model.parameters(), *model.buffers())}
    return sum(found.values())


def _model(scheduler: Any) -> ModelInfo:
    config, args = scheduler.model_config, scheduler.server_args
    text = getattr(config, "hf_text_config", None)
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    name, path = str(args.served_model_name or args.model_path), str(args.model_path)
    return ModelInfo(
        name=Path(path).name if name in ("default", path) else name,
        architecture=str(next(iter(getattr(config.hf_config, "architectures", None) or ()), "")),
        dtype=_dtype(config.dtype),
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        num_query_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", 0) or heads),
        head_dim=int(getattr(config, "head_dim", 0) or 0),
        vocab_size=int(getattr(config, "vocab_size", 0) or 0),
        max_model_len=int(config.context_len),
        quantization=str(getattr(config, "quantization", None) or ""),
    )


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _device(kind: str) -> DeviceInfo:
    is_cpu = kind.startswith("cpu")
    return DeviceInfo(
        kind=kind.partition(":")[0],
        name=platform.processor() or platform.machine() if is_cpu else "",
        num_threads=os.cpu_count() or 0,
    )


def _version() -> str:
    import sglang

    return str(sglang.__version__)
