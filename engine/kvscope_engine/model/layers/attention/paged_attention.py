"""Attention with the interface of transformers: writes a layer's keys and values, then attends over the block pool.

Owns the name under which it is registered and the per-step `PagedContext`. Must not depend on requests or policy.
`hook_check` refuses at load any model that needs more than is implemented here. See
docs/internals/decisions/0012-models-are-transformers-code.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerKV
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores
from kvscope_engine.model.layers.attention.mla.latent_runs import RunGroup, attend_runs, run_groups
from kvscope_engine.model.layers.attention.mla.latents import Latents, latents_of
from kvscope_engine.model.layers.attention.query_bias import QueryBias, attend_with_bias, bias_of
from kvscope_engine.model.layers.attention.sparse.block_skips import BlockSkips
from kvscope_engine.model.layers.attention.sparse.page_choice import Chosen, PageChoice, heads_apart
from kvscope_engine.model.layers.own_forward import OwnBatch
from kvscope_engine.model.layers.recurrent.recurrent_layers import StateStep
from kvscope_kernels import Ops
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.cpu.layer import DecodeStep
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.host_lengths import HostLengths
from kvscope_kernels.rotate_write import Rotation, rotate_torch

ATTENTION_NAME: Final = "kvscope_paged"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of a layer's attention; constant over the model's lifetime, except `bias`."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    latents: Latents | None = None
    """Conversions between latents and heads, for a layer whose cache stores latents; None for other layers. The
    key and value passed to attention are then the latents and rotary keys, with one head each.
    """
    is_chunked: bool = False
    """Whether `sliding_window` is the length of chunks of the sequence, so that a query reads only its own chunk."""
    bias: QueryBias | None = None
    """Biases of the attention scores in the current call."""

    def value_dim(self, value: torch.Tensor) -> int:
        """Return the number of elements of a head's result."""
        return value.shape[-1] if self.latents is None else self.latents.value_dim


class AttentionContext(Protocol):
    """Attention of a step, or a stub, passed through the model as the keyword `paged`."""

    scratch: dict[int, tuple[torch.Tensor, ...]]
    """Tensors that a layer computes for later layers of the same step: rotation tables, or the norm of a layer's
    output.

    The key is the id of the tensor from which they were computed. That tensor is the first element of the value: this
    keeps it alive, so that no other tensor can get the same id.
    """

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Compute attention: (T, Hq, Dk), (T, Hkv, Dk), (T, Hkv, Dv) -> (T, Hq, Dv). For latents see
        `AttentionOptions`.
        """
        ...

    def attend_fused(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Normalize and rotate fused queries, keys and values (T, Hq + 2 * Hkv, D), then compute attention -> (T, Hq,
        D).
        """
        return self.attend(layer, *rotate_torch(heads, rotation), options)


@dataclass(slots=True)
class DecodeBatch:
    """Sequences with one query token each: the first tokens of the flattened batch."""

    block_tables: tuple[torch.Tensor, ...]
    """Block ids of each sequence, shape (num_single_token, max_blocks), int32, one tensor per KV group."""
    seq_lens: torch.Tensor
    """Shape (num_single_token,), int32: length of each sequence, including the query token."""
    max_seq_len: int


@dataclass(slots=True)
class PrefillBatch:
    """Sequences with several query tokens, after those of `DecodeBatch` in the flattened batch."""

    block_tables: tuple[torch.Tensor, ...]
    """Block ids of each sequence, shape (num_prefills, max_blocks), int32, one tensor per KV group."""
    seq_lens: torch.Tensor
    """Shape (num_prefills,), int32: length of each sequence, including the query tokens."""
    max_seq_len: int
    query_start: torch.Tensor
    """Shape (num_prefills + 1,), int32: first row of each sequence, counted from the first prefill token, and the
    number of rows.
    """
    max_query_len: int
    lengths: HostLengths | None = None
    """Sequence lengths in host memory; None in steps without requests."""
    is_fixed: bool = False
    """Whether results must not depend on where query runs were split; see `QueryRuns.is_fixed`."""


class OneRequest(NamedTuple):
    """Queries of one request: rows `start` to `end` of the flattened batch. They are the last of the request's
    `num_tokens` tokens.
    """

    batch: DecodeBatch | PrefillBatch
    row: int
    """Row of the request in the tensors of `batch`."""
    start: int
    end: int
    num_tokens: int


@dataclass(slots=True)
class PagedContext(AttentionContext):
    """Attention of a step over the block pool."""

    storage: KVStorage
    ops: Ops
    slot_mapping: tuple[torch.Tensor, ...]
    """Slot to which each token's KV is written, shape (T,), int64, one tensor per KV group; -1 for padding."""
    num_single_token: int
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
    scratch: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    decode_steps: dict[tuple[int, int], tuple[DecodeStep | None]] = field(default_factory=dict)
    """Inputs that compiled layers share, by (id of the cos tensor, KV group); None if the layout of that tensor is not
    supported.
    """
    shares: AttentionScores | None = None
    """Accumulator of the decodes' attention scores; None if they are not measured in this step."""
    plans: DecodePlans = field(default_factory=DecodePlans)
    """Division of decodes and short query runs among the programs of a GPU kernel, the same for all layers."""
    choice: PageChoice | None = None
    """Choice of blocks for decodes in layers with bounds; None if they read all blocks."""
    skips: BlockSkips | None = None
    """Counter of the skipped blocks; None if they are not counted in this step."""
    run_groups: tuple[RunGroup, ...] | None = None
    """Groups of query runs over latents, the same for all layers."""
    states: StateStep | None = None
    requests: list[OneRequest] | None = None
    """Requests of the step, for layers that attend per request; read from the device once for all layers."""
    own: OwnBatch | None = None
    """Sequences of the step, for a model that runs its own forward code; else None."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write keys and values, then compute attention: (T, Hq, Dk), (T, Hkv, Dk), (T, Hkv, Dv) -> (T, Hq, Dv)."""
        kv = self.storage.layer(layer)
        if options.latents is not None:
            rotary = kv.k[..., kv.v.shape[-1] :]
            self.ops.kv_write(key, value, kv.v, rotary, self.slot_mapping[kv.group], kv.v_scale, kv.k_scale)
            return self.attend_written(query, kv, options)
        stored_dim, value_dim = kv.k.shape[-1], value.shape[-1]
        if key.shape[-1] != stored_dim:
            query, key = _widen(query, stored_dim), _widen(key, stored_dim)
        value = _widen(value, stored_dim)
        if not kv.is_shared:
            self.ops.kv_write(key, value, kv.k, kv.v, self.slot_mapping[kv.group], kv.k_scale, kv.v_scale)
            self._update_bounds(kv)
        out = self.attend_written(query, kv, options)
        return out if value_dim == stored_dim else out[..., :value_dim]

    def attend_fused(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Normalize and rotate fused queries, keys and values, write keys and values, then compute attention.

        Norm, rotation and KV write are one operation if the cache has the same head dimension and the layer stores its
        own KV.
        """
        kv = self.storage.layer(layer)
        if kv.k.shape[-1] != heads.shape[-1] or kv.is_shared:
            return self.attend(layer, *rotate_torch(heads, rotation), options)
        query = self.ops.rotate_write(heads, rotation, kv.k, kv.v, self.slot_mapping[kv.group], kv.k_scale, kv.v_scale)
        self._update_bounds(kv)
        return self.attend_written(query, kv, options)

    def _update_bounds(self, kv: LayerKV) -> None:
        if kv.bounds is not None:
            self.ops.block_bounds(kv.k, kv.bounds, self.slot_mapping[kv.group], kv.k_scale)

    def attend_written(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        """Compute attention of queries (T, Hq, D) over stored keys and values, including those of the step -> (T, Hq,
        D).
        """
        if options.bias is not None:
            return self._attend_with_bias(query, kv, options, options.bias)
        if self.prefill is None:
            return self._decode(query, kv, options, None)
        if self.decode is None:
            return self._prefill(query, kv, options, None)
        return self.attend_into(query, kv, options, query.new_empty(*query.shape[:2], options.value_dim(query)))

    def attend_into(
        self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions, out: torch.Tensor
    ) -> torch.Tensor:
        """Same as `attend_written`, but write the result to `out` and return `out`."""
        assert options.bias is None, "a graph between attention has no place for what queries bring to their scores"
        count = self.num_single_token
        if self.decode is not None:
            self._decode(query[:count], kv, options, out[:count])
        if self.prefill is not None:
            self._prefill(query[count:], kv, options, out[count:])
        return out

    def _attend_with_bias(
        self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions, bias: QueryBias
    ) -> torch.Tensor:
        out = query.new_zeros(*query.shape[:2], kv.v.shape[-1])
        if self.requests is None:  # without the padding of a step
            self.requests = [request for request in self._requests() if request.num_tokens]
        for batch, row, start, end, num_tokens in self.requests:
            table = batch.block_tables[kv.group][row : row + 1]
            args = _args(query[start:end], kv, batch, options, None, table)
            out[start:end] = attend_with_bias(args, bias.slice_queries(start, end), num_tokens)
        return out

    def _requests(self) -> Iterator[OneRequest]:
        """Yield the requests of the step. Synchronizes with the device."""
        if self.decode is not None:
            lengths = self.decode.seq_lens.tolist()
            yield from (OneRequest(self.decode, row, row, row + 1, length) for row, length in enumerate(lengths))
        if self.prefill is not None:
            starts = [self.num_single_token + start for start in self.prefill.query_start.tolist()]
            for row, ((start, end), length) in enumerate(
                zip(pairwise(starts), self.prefill.seq_lens.tolist(), strict=True)
            ):
                yield OneRequest(self.prefill, row, start, end, length)

    def _decode(
        self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions, out: torch.Tensor | None
    ) -> torch.Tensor:
        batch = self.decode
        assert batch is not None, "a step without prefill has decodes"
        latents = options.latents
        if latents is not None:
            query = latents.absorb(query)
        chosen = self._choose(batch, query, kv, options)
        if chosen is not None:
            return self._decode_chosen(chosen, batch, query, kv, options, out)
        tables = batch.block_tables[kv.group]
        shares = None if self.shares is None else self.shares.of_layer(tables, kv.group)
        if latents is not None:
            args = _args(query, kv, batch, options, None, tables)
            return latents.values(self.ops.latent_decode(args, self.plans, shares), out)
        return self.ops.decode(_args(query, kv, batch, options, out, tables), self.plans, shares)

    def _choose(self, batch: DecodeBatch, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> Chosen | None:
        if self.choice is None or kv.bounds is None:
            return None
        chosen = self.choice.choose(
            query,
            kv,
            batch.block_tables[kv.group],
            batch.seq_lens,
            batch.max_seq_len,
            scale=options.scale,
            softcap=options.softcap,
        )
        if self.skips is not None:
            self.skips.add_choice(chosen, batch.block_tables[kv.group], kv.k.shape[2])
        return chosen

    def _decode_chosen(
        self,
        chosen: Chosen,
        batch: DecodeBatch,
        query: torch.Tensor,
        kv: LayerKV,
        options: AttentionOptions,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, tables = query.reshape(len(chosen.seq_lens), -1, query.shape[-1]), batch.block_tables[kv.group]
        kv = heads_apart(kv)
        args = _args(rows, kv, chosen, options, None if out is None else out.view(rows.shape), chosen.block_tables)
        shares = None if self.shares is None else torch.zeros(chosen.block_tables.shape, device=query.device)
        result = self.ops.decode(args, None, shares).view(query.shape)
        if self.shares is not None and shares is not None:
            self.shares.add_chosen(shares, chosen, tables)
        return result

    def _prefill(
        self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions, out: torch.Tensor | None
    ) -> torch.Tensor:
        batch = self.prefill
        assert batch is not None, "only called with prefill"
        runs = QueryRuns(batch.query_start, batch.max_query_len, batch.lengths, self.plans, batch.is_fixed)
        tables = batch.block_tables[kv.group]
        if options.latents is not None:
            if self.run_groups is None:
                self.run_groups = run_groups(options.latents, batch.seq_lens, runs, batch.max_seq_len)
            args = _args(query, kv, batch, options, out, tables)
            return attend_runs(self.ops, options.latents, args, self.run_groups, self.plans)
        return self.ops.prefill(_args(query, kv, batch, options, out, tables), runs)


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers, without a mask function, so that transformers builds no masks."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as an attention function of transformers.

    Args:
        query: (1, Hq, T, D), rotated.
        key: (1, Hkv, T, D), rotated.
        value: (1, Hkv, T, D).
        kwargs: `paged` is the `AttentionContext`, the others are read by `options_of`. At load, `hook_check` refuses
            models that pass further keywords.

    Returns:
        (1, T, Hq, D), and None for the attention weights.
    """
    context = kwargs["paged"]
    tokens_first = (_rows(tensor[0].transpose(0, 1)) for tensor in (query, key, value))
    options = options_of(query, kwargs, latents_of(module), chunk_of(module))
    return context.attend(layer_of(module), *tokens_first, options)[None], None


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Return `heads` with a contiguous last dimension. It is not contiguous if the model has a convolution
    before attention.
    """
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def layer_of(module: Any) -> int:
    """Return an attention module's index among the attention layers; -1 if it has none.

    This is `layer_idx` unless the model also has layers without attention.
    """
    index = getattr(module, "kvscope_layer", module.layer_idx if hasattr(module, "layer_idx") else None)
    return -1 if index is None else int(index)


def chunk_of(module: Any) -> int | None:
    """Return the chunk length of an attention module's layer; None if its attention is not chunked.

    Read from the config, because transformers applies chunks in the mask.
    """
    config = getattr(module, "config", None)
    chunk, types = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None)
    if chunk is None or types is None or types[module.layer_idx] != "chunked_attention":
        return None
    return int(chunk)


def options_of(
    query: torch.Tensor, kwargs: dict[str, Any], latents: Latents | None = None, chunk: int | None = None
) -> AttentionOptions:
    """Return the options in the keywords of an attention call, for a layer with chunks of `chunk` tokens (None if not
    chunked).

    Without `scaling`, the scale is head_dim ** -0.5.
    """
    scaling = kwargs.get("scaling")
    return AttentionOptions(
        scale=float(scaling) if scaling is not None else float(query.shape[-1] ** -0.5),
        sliding_window=kwargs.get("sliding_window") if chunk is None else chunk,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        latents=latents,
        is_chunked=chunk is not None,
        bias=bias_of(kwargs),
    )


def _args(
    query: torch.Tensor,
    kv: LayerKV,
    batch: DecodeBatch | PrefillBatch | Chosen,
    options: AttentionOptions,
    out: torch.Tensor | None,
    block_tables: torch.Tensor,
) -> AttentionArgs:
    return AttentionArgs(
        query,
        kv.k,
        kv.v,
        block_tables,
        batch.seq_lens,
        options.scale,
        options.sliding_window,
        options.softcap,
        options.sinks,
        kv.k_scale,
        kv.v_scale,
        batch.max_seq_len,
        out,
        is_chunked=options.is_chunked,
    )


def _widen(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Pad with zeros to the stored head dimension. Zeros do not change a dot product."""
    missing = dim - tensor.shape[-1]
    return tensor if missing == 0 else pad(tensor, (0, missing))
