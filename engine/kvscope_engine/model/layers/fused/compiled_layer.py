"""Runs decoder layers on a CPU in one C call, for steps that consist of decodes only.

Decides which layers and steps are compiled. A layer gets a compiled version after weights have been quantized, if
`cpu.layer` supports all of its parts. Other layers, and steps with prefills or without a plain cache, run part by part
with the same result.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import nn

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.paged_attention import AttentionContext, PagedContext
from kvscope_engine.model.layers.fused.fused_attention import PositionEmbeddings, cos_sin_of
from kvscope_engine.model.layers.fused.fused_layer import FusedLayer
from kvscope_engine.model.layers.fused.fused_mlp import FusedMLP
from kvscope_engine.model.layers.fused.fused_norm import FastRMSNorm
from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.layers.fused.int8_linear import Int8Linear
from kvscope_kernels import ops_for
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.layer import CompiledLayer, DecodeStep, LayerSpec, Norm, Weight, can_compile
from kvscope_kernels.rotate_write import CosSin


class CompiledFusedLayer:
    """Compiled version of a fused layer, called instead of it in the steps that it supports."""

    def __init__(self, layer: FusedLayer, spec: LayerSpec) -> None:
        self._layer_index, self._head_dim = layer.attention.layer, layer.attention.head_dim
        self._layer_spec = spec
        self._group = 0
        self._ops = ops_for("cpu")
        self._storage: ref[KVStorage] | None = None
        self._compiled: CompiledLayer | None = None

    def run(
        self,
        x: torch.Tensor,
        normed: torch.Tensor | None,
        position_embeddings: PositionEmbeddings,
        paged: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Run the layer in one call. Returns None if this step is not supported.

        Args:
            x: (T, hidden).
            normed: Attention norm of `x`, if the previous layer computed it.

        Returns:
            The layer's output, and the next layer's norm of that output.
        """
        if not isinstance(paged, PagedContext) or not self._supports_step(paged):
            return None
        compiled = self._compiled_for(paged.storage)
        step = _step(paged, cos_sin_of(position_embeddings, self._head_dim, paged), self._group)
        if compiled is None or step is None or not compiled.supports(x, normed, step):
            return None
        if paged.shares is not None:
            paged.shares.count_layer(self._group)
        return compiled(x, normed, step)

    def _supports_step(self, paged: PagedContext) -> bool:
        return paged.prefill is None and paged.ops is self._ops

    def _compiled_for(self, storage: KVStorage) -> CompiledLayer | None:
        if self._storage is None or self._storage() is not storage:
            kv = storage.layer(self._layer_index)
            self._group = kv.group
            is_plain = (
                kv.k_scale is None and kv.v_scale is None and kv.bounds is None
            )  # scales and block bounds would have to be written too
            is_ours = is_plain and can_compile(self._layer_spec, kv.k, kv.v)
            self._compiled = CompiledLayer(self._layer_spec, kv.k, kv.v) if is_ours else None
            self._storage = ref(storage)
        return self._compiled


def compile_layers(module: nn.Module) -> int:
    """Set `compiled` of each fused layer of `module` that is supported. Returns the number of these layers."""
    layers = [getattr(submodule, "kvscope_fused", None) for submodule in module.modules()]
    count = 0
    for layer in layers:
        spec = _layer_spec(layer) if isinstance(layer, FusedLayer) else None
        if spec is not None and isinstance(layer, FusedLayer):
            layer.compiled = CompiledFusedLayer(layer, spec)
            count += 1
    return count


def _layer_spec(layer: FusedLayer) -> LayerSpec | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, FusedMLP):
        return None
    linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    products = [weight for linear in linears if (weight := _weight(linear)) is not None]
    kind, dtype = mlp.activation_kind, layer.attention_norm.dtype
    if len(products) != len(linears) or kind is None or not attention.rotates:
        return None
    options = attention.options
    following = None if layer.next_norm is None else _norm(layer.next_norm)
    head_norm = None if attention.norm is None else Norm(attention.norm.weight, float(attention.norm.eps))
    return LayerSpec(
        products=products,
        norms=(_norm(layer.attention_norm), _norm(layer.mlp_norm), following),
        head_norm=head_norm,
        activation=kind,
        num_heads=attention.num_query_heads,
        num_kv_heads=attention.num_kv_heads,
        scale=options.scale,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks.detach().float().contiguous(),
        is_chunked=options.is_chunked,
        dtype=dtype,
        sum_dtype=torch.float32 if layer.keeps_float32 else dtype,
    )


def _weight(linear: object) -> Weight | None:
    """Return the quantized weight of `linear`; None if the matmul with it cannot be compiled."""
    if type(linear) is Int8Linear:
        return linear.weight_of_8_bits
    if type(linear) is GroupedLinear and isinstance(linear.grouped, NativeGrouped):
        return linear.grouped
    return None


def _norm(norm: FastRMSNorm) -> Norm:
    return Norm(norm.weight, float(norm.eps))


def _step(paged: PagedContext, cos_sin: CosSin, group: int) -> DecodeStep | None:
    """Return the step's decode inputs; None if their layout is not supported.

    Cached per step for each KV group and (cos, sin) pair of the model.
    """
    cached_step = paged.decode_steps.get((id(cos_sin.cos), group))
    if cached_step is None:
        batch = paged.decode
        assert batch is not None, "a step without prefill has decodes"
        tables = batch.block_tables[group]
        shares = None if paged.shares is None else paged.shares.total(tables, group)
        step = DecodeStep(cos_sin, paged.slot_mapping[group], tables, batch.seq_lens, shares)
        cached_step = paged.decode_steps[id(cos_sin.cos), group] = (step if step.has_supported_layout else None,)
    return cached_step[0]
