"""Derives the `ModelWork` of a loaded model: the sizes and FLOPs from which the work of each step is computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.model.cpu_offload.streaming import streamed_weights
from kvscope_engine.model.hf_config import EXPERT_COUNTS
from kvscope_engine.model.kv_cache.kv_storage import block_bytes
from kvscope_engine.model.layers.fused.fused_experts import FusedExperts
from kvscope_engine.model.layers.weight_bytes import LORA, weights_by_part
from kvscope_engine.model.runner.sparse_layers import may_choose
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_engine.roofline.step_costs import LayerKind, ModelWork

if TYPE_CHECKING:
    import torch

    from kvscope_engine.model.layers.attention.sparse.page_choice import PageChoice
    from kvscope_engine.model.loaded_model import LoadedModel

_ACTIVE_EXPERT_COUNTS: Final = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


def model_work(loaded: LoadedModel, kv_dtype: torch.dtype, choice: PageChoice | None = None) -> ModelWork:
    """Return the `ModelWork` of `loaded` with a KV cache in `kv_dtype`.

    With `choice` (sparse decode), decodes read only the selected blocks.
    """
    config: Any = loaded.hf_config.get_text_config(decoder=True)
    info, calls = loaded.info, check_hook(loaded.module)
    parts = {part.name: part.num_bytes for part in weights_by_part(loaded.module) if part.name != LORA}
    streamed = streamed_weights(loaded.module)
    host_bytes = max(0, streamed.num_bytes - streamed.stage_bytes) if streamed is not None else 0
    hidden = int(config.hidden_size)
    head = parts.get("Head", 0)
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    experts, share = _experts(config, parts)
    embedding_weights = info.vocab_size * hidden
    linear = info.num_parameters - embedding_weights * (1 if is_tied else 2)
    fused = [part for part in loaded.module.modules() if isinstance(part, FusedExperts)]
    num_expert_weights = sum(part.num_weights for part in fused) or experts / loaded.dtype.itemsize
    num_inactive = round(num_expert_weights * (1 - share))
    return ModelWork(
        kinds=Counter(_layer_kind(index, call, kv_dtype, choice) for index, call in enumerate(calls)),
        weights_bytes=sum(parts.values()) + host_bytes - parts.get("Embeddings", 0) - head - experts,
        head_bytes=head or parts.get("Embeddings", 0),
        expert_bytes=experts,
        expert_share=share,
        linear_flops=2 * max(linear - num_inactive, 0),
        head_flops=2 * embedding_weights,
        token_bytes=loaded.dtype.itemsize * sum(_num_activations(call, config, hidden) for call in calls),
        vocab_size=info.vocab_size,
        streamed_bytes=streamed.pass_bytes if streamed is not None else 0,
    )


def _layer_kind(index: int, call: LayerCall, kv_dtype: torch.dtype, choice: PageChoice | None) -> LayerKind:
    return LayerKind(
        window=call.options.sliding_window or 0,
        is_chunked=call.options.is_chunked,
        kv_bytes=block_bytes(
            [replace(call.shape, shares_with=None)], 1, kv_dtype
        ),  # each layer that shares a cache reads it
        flops_per_pair=2 * call.num_query_heads * call.shape.num_multiplied,
        attended=choice.num_tokens_read if choice is not None and may_choose(index, call) else None,
    )


def _num_activations(call: LayerCall, config: Any, hidden: int) -> int:
    """Return the number of elements that the linear layers of one layer read and write per token."""
    width = call.shape.parts[0].shape[-1] if call.shape.parts else call.shape.head_dim
    queries, keys = call.num_query_heads * width, call.shape.num_kv_heads * call.shape.head_dim
    intermediate_size = getattr(config, "intermediate_size", None)
    return (
        4 * hidden
        + 2 * queries
        + 2 * keys
        + 3 * (intermediate_size if isinstance(intermediate_size, int) else 4 * hidden)
    )


def _experts(config: Any, parts: dict[str, int]) -> tuple[int, float]:
    """Return the bytes of all experts, and the fraction of the experts that one token uses; (0, 1.0) for a
    dense model.
    """
    num_experts, num_active = (_whole_number(config, names) for names in (EXPERT_COUNTS, _ACTIVE_EXPERT_COUNTS))
    if not num_experts or not num_active or "Experts" not in parts:
        return 0, 1.0
    return parts["Experts"], min(num_active / num_experts, 1.0)


def _whole_number(config: Any, names: tuple[str, ...]) -> int:
    """Return the value of the first attribute in `names` that is set in `config`; 0 if none is set or it is not
    an integer.
    """
    value = next((value for name in names if (value := getattr(config, name, None))), 0)
    return value if isinstance(value, int) else 0
