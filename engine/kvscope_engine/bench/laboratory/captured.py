"""Captures keys, values and queries of a model that reads a text, and runs the model with its attention replaced.

Owns the attention contexts that replace the engine's. Independent of particular attention methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope_engine.bench.laboratory.methods import AttentionMethod
from kvscope_engine.model.layers.attention.paged_attention import AttentionContext, AttentionOptions
from kvscope_engine.model.layers.forward import Forward
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class LayerSample:
    """Keys and values of a text in one layer, (T, Hkv, D) each, and the queries of the text's last tokens, (B,
    H, D).
    """

    query: Tensor
    keys: Tensor
    values: Tensor


class DenseContext(AttentionContext):
    """Attention context that stores the keys and values of each layer contiguously, and attends causally.

    If `new_method` is given, single tokens attend with the method that it creates, instead of full attention.
    """

    def __init__(self, new_method: Callable[[], AttentionMethod] | None = None) -> None:
        self.scratch: dict[int, tuple[Tensor, ...]] = {}
        self.new_method = new_method
        self.kv_of_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self.queries: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Append `key` and `value` to the layer, and attend with `query`. All have shape (T, heads, D); returns (T, H,
        D).

        Raises BadInput for windows, soft caps and sinks.
        """
        if options.sliding_window or options.softcap or options.sinks is not None:
            raise BadInput("the laboratory takes models with plain attention: no window, soft cap or sinks")
        if options.latents is not None:  # key and value are then a latent and its rotary key, with one head each
            key, value = options.latents.expand(torch.cat((key, value), -1)[:, 0])
        if layer in self.kv_of_layer:
            key, value = (torch.cat(pair) for pair in zip(self.kv_of_layer[layer], (key, value), strict=True))
        self.kv_of_layer[layer], self.queries[layer] = (key, value), query
        if len(query) == 1 and self.new_method is not None:
            method = self.new_method()
            method.store_kv(key[None], value[None])
            # The method divides scores by sqrt(D): multiply by that, so that the model's own scale applies.
            return method.attend(query * (options.scale * query.shape[-1] ** 0.5))
        return _causal(query, key, value, options.scale)

    def restored(self, length: int, new_method: Callable[[], AttentionMethod] | None) -> DenseContext:
        """Return a context in the state after `length` tokens, from which to continue with another attention method."""
        other = DenseContext(new_method)
        other.kv_of_layer = {layer: (k[:length], v[:length]) for layer, (k, v) in self.kv_of_layer.items()}
        return other


def capture_text(loaded: LoadedModel, ids: Sequence[int], show_progress: Callable[[int], None]) -> DenseContext:
    """Run the model over a text in chunks, and return the context with all keys and values.

    The progress callback gets the number of tokens done.
    """
    context, forward = DenseContext(), Forward(loaded.module)
    tokens = torch.tensor(ids, device=loaded.device)
    with torch.inference_mode():
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            context.scratch.clear()
            forward.fill(tokens[part], torch.arange(len(ids), device=loaded.device)[part], context)
            show_progress(min(start + CHUNK_TOKENS, len(ids)))
    return context


def sample_layers(context: DenseContext, length: int, batch: int, num_layers: int) -> list[LayerSample]:
    """Return samples of evenly spaced layers, with the keys and values of the first `length` tokens.

    The queries are those of the last tokens of the whole text, whatever `length` is, as if these tokens followed the
    first `length` tokens.
    """
    layers = sorted(context.kv_of_layer)
    selected = {layers[index * (len(layers) - 1) // max(1, num_layers - 1)] for index in range(num_layers)}
    layer_samples = []
    for layer in sorted(selected):
        keys, values = context.kv_of_layer[layer]
        layer_samples.append(LayerSample(context.queries[layer][-batch:], keys[:length], values[:length]))
    return layer_samples


def perplexity_after(
    loaded: LoadedModel,
    context: DenseContext,
    ids: Sequence[int],
    num_scored: int,
    new_method: Callable[[], AttentionMethod],
) -> float:
    """Return the perplexity of the last `num_scored` - 1 tokens of a text, decoded one at a time with a method.

    The first of the last `num_scored` tokens is only read. `context` has the keys and values of at least the tokens
    before it, computed with full attention.
    """
    start = len(ids) - num_scored
    method_context, forward = context.restored(start, new_method), Forward(loaded.module)
    tokens, total = torch.tensor(ids, device=loaded.device), 0.0
    with torch.inference_mode():
        for index in range(start, len(ids) - 1):
            method_context.scratch.clear()
            position = torch.tensor([index], device=loaded.device)
            logits = forward.logits(tokens[index : index + 1], position, method_context)
            total -= float(logits[0].double().log_softmax(-1)[ids[index + 1]])
    return math.exp(total / (num_scored - 1))


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    count, length = len(query), len(key)
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    position = torch.arange(length, device=query.device)
    mask = position[None] <= position[length - count :, None]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
