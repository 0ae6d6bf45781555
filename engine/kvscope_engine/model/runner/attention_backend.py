"""Chooses the implementation of prefill attention on a GPU, according to `--attention-backend`.

The choice precedes the sizing of the KV cache, so that a library's workspace is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from kvscope_engine.model.layers.own_forward import own_forward
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_kernels import ops_for
from kvscope_kernels.launch import compute_capability
from kvscope_kernels.third_party_attention.library import AttentionShape
from kvscope_kernels.third_party_attention.library_choice import (
    AUTO,
    OURS,
    Clock,
    LibraryChoice,
    Unusable,
    by_events,
    choose,
)
from kvscope_kernels.third_party_attention.prefill_with_fallback import Options
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput


def attention_choice(
    config: EngineConfig, loaded: LoadedModel, report: Callable[[str], object], clock: Clock = by_events
) -> LibraryChoice:
    """Choose the attention library; `report` is called with a description of each candidate that is timed.

    Raises:
        BadInput: The requested library cannot run this model on this device.
    """
    ops, requested = ops_for(loaded.device.type), config.attention_backend
    if loaded.device.type != "cuda":
        if requested not in (AUTO, OURS):
            raise BadInput(f"attention_backend={requested!r} is not accepted on a CPU: auto or kvscope")
        return LibraryChoice(ops, "")
    if config.kv_cache_dtype != "auto":
        if requested not in (AUTO, OURS):
            raise BadInput(f"attention_backend={requested!r} is not accepted with a cache of 8 bits: auto or kvscope")
        requested = OURS
    if config.deterministic:
        requested = OURS
    if own_forward(loaded.module) is not None:
        if requested not in (AUTO, OURS):
            raise BadInput(
                f"attention_backend={requested!r} is not accepted: the model is run by transformers' own code"
            )
        return LibraryChoice(ops, "")
    if any(call.shape.latent_dim for call in check_hook(loaded.module)):
        if requested not in (AUTO, OURS):
            raise BadInput(
                f"attention_backend={requested!r} is not accepted with latents in the cache: auto or kvscope"
            )
        requested = OURS
    shape = AttentionShape(
        num_heads=loaded.num_query_heads,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        block_size=config.block_size,
        dtype=loaded.dtype,
        capability=compute_capability(loaded.device),
    )
    try:
        return choose(ops, shape, loaded.device, requested, layer_options(loaded), clock, report)
    except Unusable as error:
        raise BadInput(f"attention_backend={requested!r} is not accepted here ({error}): auto or kvscope") from None


def layer_options(loaded: LoadedModel) -> tuple[Options, ...]:
    """Return the variants of attention that the model's layers may use, as (has a window, has a logit softcap)
    pairs.
    """
    text = loaded.hf_config.get_text_config()
    windows = (False, True) if getattr(text, "sliding_window", None) else (False,)
    return tuple(product(windows, (bool(getattr(text, "attn_logit_softcapping", None)),)))
