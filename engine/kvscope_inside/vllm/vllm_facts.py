"""Builds the `Hello` message of a vLLM engine core from its configuration: model, pool, KV groups, device.

Only reads vLLM's objects.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from kvscope_inside.endpoints import api_of
from kvscope_inside.host_facts import device_info, dtype_name, model_info
from kvscope_inside.latents import expanded_times
from kvscope_inside.vllm.offloading import offloading_of, second_pool
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    Hello,
    KVGroup,
    ModelInfo,
)
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE
from kvscope_telemetry.transport.host_id import host_id

_KINDS: Final = (
    ("Mamba", "state"),
    ("MLA", "latent"),
    ("SlidingWindow", "window"),
    ("RSWA", "window"),
    ("Chunked", "chunked"),
    ("Cross", "cross"),
)
"""Pairs of a substring of a KV cache spec's class name and the kind of KV group. The first match counts."""


def hello_of(scheduler: Any, epoch: int) -> Hello:
    config, cache = scheduler.vllm_config, scheduler.kv_cache_config
    times = expanded_times(config.model_config.hf_text_config, int(config.parallel_config.tensor_parallel_size))
    groups = tuple(kv_group(group, times) for group in cache.kv_cache_groups)
    num_blocks = len(scheduler.kv_cache_manager.block_pool.blocks)
    limits, offloading, api = scheduler.scheduler_config, offloading_of(scheduler), api_of("vllm", rank_of(scheduler))
    second = second_pool(scheduler)
    num_host = offloading.num_blocks if offloading is not None else 0
    num_disk = 0
    if second is not None:
        num_host, num_disk = (0, second.num_blocks) if second.is_on_disk else (second.num_blocks, 0)
    return Hello(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=_model(config),
        cache=CacheInfo(
            num_blocks=num_blocks,
            block_size=groups[0].block_size if groups else int(scheduler.block_size),
            block_bytes=kv_bytes(scheduler) // num_blocks,
            dtype=_cache_dtype(config),
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            max_num_seqs=int(limits.max_num_seqs),
            max_num_batched_tokens=int(limits.max_num_batched_tokens),
            num_host_blocks=num_host,
            num_disk_blocks=num_disk,
            has_parents=True,
            groups=groups,
            num_reserved_blocks=1,  # the null block
            hit_tokens=_hit_tokens(scheduler),
        ),
        device=device_info(str(config.device_config.device_type)),
        engine_version=f"vLLM {_version()}",
        pid=os.getpid(),
        host=host_id(),
        capabilities=Capabilities(
            engine="vllm",
            completions=bool(api),
            aborts=True,
            groups=len(groups) > 1,
            eviction_order=True,
            prompt_estimates=bool(api),
        ),
        num_ranks=int(config.parallel_config.tensor_parallel_size),
        api=api,
    )


def rank_of(scheduler: Any) -> int:
    config = scheduler.vllm_config.parallel_config
    return int(getattr(config, "data_parallel_index", None) or config.data_parallel_rank or 0)


def kv_bytes(scheduler: Any) -> int:
    """Return the bytes of all blocks, summed over all layers."""
    return sum(int(tensor.size) for tensor in scheduler.kv_cache_config.kv_cache_tensors)


def max_adapters(scheduler: Any) -> int:
    """Return the maximum number of LoRA adapters in a batch; 0 without LoRA."""
    return int(getattr(getattr(scheduler.vllm_config, "lora_config", None), "max_loras", 0) or 0)


def _hit_tokens(scheduler: Any) -> int:
    """Return the number of tokens that prefix hits are a multiple of, if there are several KV groups.

    At such multiples, blocks of all groups end. The number can be smaller if vLLM stores recurrent states within a
    block. It is 0 for one group, or for a version of vLLM without the attribute.
    """
    return int(getattr(scheduler.kv_cache_manager.coordinator, "_cache_hit_alignment_tokens", 0))


def kv_group(group: Any, times: float) -> KVGroup:
    """Convert one KV group. `times`: size of expanded keys and values divided by that of latents (MLA)."""
    spec = group.kv_cache_spec
    name = type(spec).__name__
    layers = len(group.layer_names)
    kind, num_bytes = (
        next((kind for substring, kind in _KINDS if substring in name), "full"),
        int(spec.page_size_bytes) * layers,
    )
    return KVGroup(
        kind=kind,
        num_layers=layers,
        block_size=min(int(spec.block_size), MAX_BLOCK_SIZE),
        block_bytes=num_bytes,
        expanded_bytes=round(times * num_bytes) if kind == "latent" else 0,
        window=int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0),
        num_draft_layers=_num_draft_layers(group),
    )


def _num_draft_layers(group: Any) -> int:
    """Return `KVGroup.num_draft_layers`.

    vLLM 0.33 marks the specification of each layer (`is_draft`), and groups of layers of one type keep them all. Other
    groups have only a merged specification, which has the mark of the first layer or none; `is_eagle_group` then says
    that the group contains layers of a draft model.
    """
    spec, num_layers = group.kv_cache_spec, len(group.layer_names)
    by_layer = getattr(spec, "kv_cache_specs", None)
    if isinstance(by_layer, dict) and any(getattr(each, "is_draft", False) for each in by_layer.values()):
        return sum(bool(getattr(by_layer.get(name), "is_draft", False)) for name in group.layer_names)
    if getattr(spec, "is_draft", False):
        return num_layers
    return -1 if getattr(group, "is_eagle_group", False) else 0


def _model(config: Any) -> ModelInfo:
    model = config.model_config
    return model_info(
        model.hf_config,
        model.hf_text_config,
        name=_name(model),
        dtype=dtype_name(model.dtype),
        max_model_len=int(model.max_model_len),
        quantization=str(model.quantization or ""),
    )


def _name(model: Any) -> str:
    """Return the served name of the model. The name "default" is replaced by the folder's name, because in
    kvscope "default" means kvscope's own default model.
    """
    served = model.served_model_name
    name = str(served[0] if isinstance(served, list | tuple) and served else served or model.model)
    return Path(str(model.model)).name if name == "default" else name


def _cache_dtype(config: Any) -> str:
    dtype = str(config.cache_config.cache_dtype)
    return dtype_name(config.model_config.dtype) if dtype == "auto" else dtype


def _version() -> str:
    import vllm

    return str(vllm.__version__)
