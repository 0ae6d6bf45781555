"""Registry of operations: which implementation is used on a device (`ops_for`), and why (`explain_ops`).

On `cpu`, these are the operations compiled from C if the machine can compile them (`cpu`), and otherwise the torch
references, which support everything. On `cuda`, they are the Triton kernels, except where the engine measured at load
that an attention library or torch is faster (`attention_backend.py` and `product_choice.py` in
`kvscope_engine/model/runner`). The choice by device is made at load (`ops_for`), and callers pass the result on. A C
operation also checks at each call whether it supports its arguments, because callers may pass other dtypes than the
model's; `explain_ops` makes the same checks, so that it names the implementation that actually runs.

The engine decides which layers of a model use these operations. A norm that was not fused is transformers' module
(`kvscope_engine/model/verification/fuse.py`). In steps of decodes only, a whole layer on a CPU may be one C call
(`kvscope_engine/model/layers/fused/compiled_layer.py`).

Importing this module compiles nothing, starts neither Triton nor CUDA, and works without Triton installed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Final, Protocol

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.attention_scores.block_bounds import block_bounds, block_bounds_torch
from kvscope_kernels.attention_scores.block_scores import block_scores, block_scores_torch
from kvscope_kernels.copy_rows import RowTensors, copy_rows, copy_rows_torch
from kvscope_kernels.cpu.decode import decode_refusal, paged_decode_attention_native
from kvscope_kernels.cpu.latent import latent_decode_native, latent_prefill_native
from kvscope_kernels.cpu.layers import (
    MAX_ELEMENTS_PER_CALL,
    add_rms_norm_native,
    gated_activation_native,
    rms_norm_native,
    rotate_write_native,
)
from kvscope_kernels.cpu.library import library, library_refusal
from kvscope_kernels.cpu.operand_types import cache_refusal, dtype_refusal
from kvscope_kernels.cpu.prefill import paged_prefill_attention_native, prefill_refusal
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.fused_moe.expert_weights import ExpertWeights
from kvscope_kernels.fused_moe.mixture import mix_experts, mix_experts_torch
from kvscope_kernels.gated_activation import gated_activation, gated_activation_torch
from kvscope_kernels.kv_write import kv_write, kv_write_torch
from kvscope_kernels.linear.skinny_linear import Linear, linear, linear_torch
from kvscope_kernels.logits.allow_tokens import allow_tokens, allow_tokens_torch
from kvscope_kernels.logits.draw_tokens import draw_tokens, draw_tokens_torch
from kvscope_kernels.operation_row import TORCH, TRITON, C, NamedImplementation, Operands, OperationChoice
from kvscope_kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_torch
from kvscope_kernels.paged_latent_attention import (
    latent_decode,
    latent_decode_torch,
    latent_prefill,
    latent_prefill_torch,
)
from kvscope_kernels.paged_prefill_attention import paged_prefill_attention, paged_prefill_attention_torch
from kvscope_kernels.rms_norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from kvscope_kernels.rotate_write import Rotation, rotate_write, rotate_write_torch
from kvscope_kernels.triton_language import require_triton


class KvWrite(Protocol):
    """Signature of `kv_write.kv_write`."""

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None: ...


class DecodeAttention(Protocol):
    """Signature of `paged_decode_attention.paged_decode_attention`."""

    def __call__(
        self, args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None
    ) -> Tensor: ...


class PrefillAttention(Protocol):
    """Signature of `paged_prefill_attention.paged_prefill_attention`."""

    def __call__(self, args: AttentionArgs, runs: QueryRuns) -> Tensor: ...


class BlockBounds(Protocol):
    """Signature of `attention_scores.block_bounds.block_bounds`."""

    def __call__(
        self, k_cache: Tensor, bounds: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None
    ) -> None: ...


class BlockScores(Protocol):
    """Signature of `attention_scores.block_scores.block_scores`."""

    def __call__(
        self,
        query: Tensor,
        bounds: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        block_size: int,
        scale: float,
        softcap: float | None = None,
        max_seq_len: int | None = None,
    ) -> Tensor: ...


class CopyRows(Protocol):
    """Signature of `copy_rows.copy_rows`."""

    def __call__(self, rows: RowTensors, pairs: Tensor) -> None: ...


class RotateWrite(Protocol):
    """Signature of `rotate_write.rotate_write`."""

    def __call__(
        self,
        heads: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor: ...


class RmsNorm(Protocol):
    """Signature of `rms_norm.rms_norm`."""

    def __call__(self, x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor: ...


class AddRmsNorm(Protocol):
    """Signature of `rms_norm.add_rms_norm`."""

    def __call__(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


class GatedActivation(Protocol):
    """Signature of `gated_activation.gated_activation`."""

    def __call__(self, both: Tensor, kind: int) -> Tensor: ...


class MixExperts(Protocol):
    """Signature of `fused_moe.mixture.mix_experts`."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor: ...


class AllowTokens(Protocol):
    """Signature of `logits.allow_tokens.allow_tokens`."""

    def __call__(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None: ...


class DrawTokens(Protocol):
    """Signature of `logits.draw_tokens.draw_tokens`."""

    def __call__(self, logits: Tensor, options: Tensor, keys: Tensor, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations of one device type. The type of each field names the function that documents it."""

    kv_write: KvWrite
    decode: DecodeAttention
    prefill: PrefillAttention
    copy_rows: CopyRows
    rotate_write: RotateWrite
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    gated_activation: GatedActivation
    linear: Linear
    mix_experts: MixExperts
    allow_tokens: AllowTokens
    draw_tokens: DrawTokens
    block_bounds: BlockBounds
    block_scores: BlockScores
    latent_decode: DecodeAttention
    """Decode attention over MLA latents; see `paged_latent_attention.latent_decode`."""
    latent_prefill: PrefillAttention


_TORCH: Final = Ops(
    kv_write_torch,
    paged_decode_attention_torch,
    paged_prefill_attention_torch,
    copy_rows_torch,
    rotate_write_torch,
    rms_norm_torch,
    add_rms_norm_torch,
    gated_activation_torch,
    linear_torch,
    mix_experts_torch,
    allow_tokens_torch,
    draw_tokens_torch,
    block_bounds_torch,
    block_scores_torch,
    latent_decode_torch,
    latent_prefill_torch,
)
_C: Final = replace(
    _TORCH,
    decode=paged_decode_attention_native,
    prefill=paged_prefill_attention_native,
    rotate_write=rotate_write_native,
    rms_norm=rms_norm_native,
    add_rms_norm=add_rms_norm_native,
    gated_activation=gated_activation_native,
    latent_decode=latent_decode_native,
    latent_prefill=latent_prefill_native,
)
_C_REFUSALS: Final[Mapping[str, Callable[[Operands], str]]] = {
    "decode": lambda given: decode_refusal(*given),
    "prefill": lambda given: prefill_refusal(*given[:3]),
    "rotate_write": lambda given: cache_refusal(given.dtype, given.cache_dtype),
    "rms_norm": lambda given: dtype_refusal(given.dtype),
    "add_rms_norm": lambda given: dtype_refusal(given.dtype),
    "gated_activation": lambda given: dtype_refusal(given.dtype),
    # 8-bit latents are dequantized to the activations' dtype before C reads them (`latent_blocks.plain_latents`).
    "latent_decode": lambda given: decode_refusal(given.dtype, given.dtype, given.head_dim, given.value_dim),
    "latent_prefill": lambda given: prefill_refusal(given.dtype, given.dtype, given.head_dim),
}
"""For each operation that exists in C, the check that it makes at each call. A check returns the reason for a
refusal, or "".
"""
_SINGLE_THREADED: Final = ("rotate_write", "rms_norm", "add_rms_norm", "gated_activation")
_LABELS: Final[Mapping[str, str]] = {
    "kv_write": "KV write",
    "decode": "decode attention",
    "prefill": "prefill attention",
    "copy_rows": "block copies",
    "rotate_write": "rotary embedding and KV write",
    "rms_norm": "RMSNorm",
    "add_rms_norm": "sum and RMSNorm",
    "mix_experts": "experts",
    "allow_tokens": "structured output mask",
    "draw_tokens": "sampling",
    "block_bounds": "sparse decode: block bounds",
    "block_scores": "sparse decode: block scores",
    "latent_decode": "MLA decode attention",
    "latent_prefill": "MLA prefill attention",
}
"""User-visible names of operations. An operation without one is shown by its field name in `Ops`."""
_CUDA: Final = Ops(
    kv_write,
    paged_decode_attention,
    paged_prefill_attention,
    copy_rows,
    rotate_write,
    rms_norm,
    add_rms_norm,
    gated_activation,
    linear,
    mix_experts,
    allow_tokens,
    draw_tokens,
    block_bounds,
    block_scores,
    latent_decode,
    latent_prefill,
)


def ops_for(device_type: str) -> Ops:
    """Return the operations for "cpu" or "cuda".

    Raises:
        ValueError: Any other device type.
        RuntimeError: "cuda" without Triton installed.
    """
    if device_type == "cpu":
        return cpu_ops()
    if device_type == "cuda":
        require_triton()
        return _CUDA
    raise ValueError(f"device_type={device_type!r} is not accepted: cpu or cuda")


def torch_ops() -> Ops:
    """Return the torch references, which support all operands on any device."""
    return _TORCH


@cache
def cpu_ops() -> Ops:
    """Return the operations for a CPU. The first call on a machine compiles the C library, which takes seconds."""
    return _TORCH if library() is None else _C


def explain_ops(ops: Ops, operands: Operands) -> dict[str, OperationChoice]:
    """Return the implementation that each operation of `ops` uses for operands like these, by field name."""
    return {field.name: _explain(ops, field.name, operands) for field in fields(Ops)}


def _explain(ops: Ops, name: str, operands: Operands) -> OperationChoice:
    operation, implementation = _LABELS.get(name, name.replace("_", " ")), getattr(ops, name)
    if isinstance(implementation, NamedImplementation):
        reason = f"chosen at load; {TRITON} for layers that it does not support"
        return OperationChoice(operation, implementation.implementation, reason)
    if implementation is getattr(_CUDA, name):
        return OperationChoice(operation, TRITON, "the device is a CUDA GPU")
    if implementation is getattr(_TORCH, name):
        reason = library_refusal() if name in _C_REFUSALS else "there is no C implementation"
        return OperationChoice(operation, TORCH, reason)
    if implementation is not getattr(_C, name):
        return OperationChoice(
            operation, getattr(implementation, "__name__", type(implementation).__name__), "given by the caller"
        )
    if refusal := _C_REFUSALS[name](operands):
        return OperationChoice(operation, TORCH, refusal)
    limit = f"; {TORCH} for more than {MAX_ELEMENTS_PER_CALL:,} numbers a call" if name in _SINGLE_THREADED else ""
    return OperationChoice(operation, C, f"compiled for this CPU{limit}")
