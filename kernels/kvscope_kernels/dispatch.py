"""Which implementation of the operations a device gets. The choice is made once, at load, and passed down.

`cpu` gets the operations compiled from C where the machine can compile them (`cpu`), and the torch references,
which do everything, where not; `cuda` gets the Triton kernels. Importing this compiles nothing, starts neither Triton
nor CUDA, and works where Triton is not installed.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Protocol

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.attention_scores.block_bounds import block_bounds, block_bounds_torch
from kvscope_kernels.attention_scores.block_scores import block_scores, block_scores_torch
from kvscope_kernels.copy_rows import RowTensors, copy_rows, copy_rows_torch
from kvscope_kernels.cpu.decode import paged_decode_attention_native
from kvscope_kernels.cpu.latent import latent_decode_native, latent_prefill_native
from kvscope_kernels.cpu.layers import (
    add_rms_norm_native,
    gated_activation_native,
    rms_norm_native,
    rotate_write_native,
)
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.prefill import paged_prefill_attention_native
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.fused_moe.expert_weights import ExpertWeights
from kvscope_kernels.fused_moe.mixture import mix_experts, mix_experts_torch
from kvscope_kernels.gated_activation import gated_activation, gated_activation_torch
from kvscope_kernels.kv_write import kv_write, kv_write_torch
from kvscope_kernels.linear.skinny_linear import Linear, linear, linear_torch
from kvscope_kernels.logits.allow_tokens import allow_tokens, allow_tokens_torch
from kvscope_kernels.logits.draw_tokens import draw_tokens, draw_tokens_torch
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
    """See `kv_write.kv_write`."""

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
    """See `paged_decode_attention.paged_decode_attention`."""

    def __call__(
        self, args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None
    ) -> Tensor: ...


class PrefillAttention(Protocol):
    """See `paged_prefill_attention.paged_prefill_attention`."""

    def __call__(self, args: AttentionArgs, runs: QueryRuns) -> Tensor: ...


class BlockBounds(Protocol):
    """See `attention_scores.block_bounds.block_bounds`."""

    def __call__(
        self, k_cache: Tensor, bounds: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None
    ) -> None: ...


class BlockScores(Protocol):
    """See `attention_scores.block_scores.block_scores`."""

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
    """See `copy_rows.copy_rows`."""

    def __call__(self, rows: RowTensors, pairs: Tensor) -> None: ...


class RotateWrite(Protocol):
    """See `rotate_write.rotate_write`."""

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
    """See `rms_norm.rms_norm`."""

    def __call__(self, x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor: ...


class AddRmsNorm(Protocol):
    """See `rms_norm.add_rms_norm`."""

    def __call__(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


class GatedActivation(Protocol):
    """See `gated_activation.gated_activation`."""

    def __call__(self, both: Tensor, kind: int) -> Tensor: ...


class MixExperts(Protocol):
    """See `fused_moe.mixture.mix_experts`."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor: ...


class AllowTokens(Protocol):
    """See `logits.allow_tokens.allow_tokens`."""

    def __call__(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None: ...


class DrawTokens(Protocol):
    """See `logits.draw_tokens.draw_tokens`."""

    def __call__(self, logits: Tensor, options: Tensor, keys: Tensor, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one device type."""

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
    """See `paged_latent_attention.latent_decode`."""
    latent_prefill: PrefillAttention


_CPU: Final = Ops(
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
    """The operations for `cpu` or `cuda`.

    Raises ValueError for any other device type, RuntimeError for `cuda` where Triton is not installed.
    """
    if device_type == "cpu":
        return cpu_ops()
    if device_type == "cuda":
        require_triton()
        return _CUDA
    raise ValueError(f"device_type={device_type!r} is not accepted: cpu or cuda")


def torch_ops() -> Ops:
    """The references, which do everything that there is, on any device."""
    return _CPU


@cache
def cpu_ops() -> Ops:
    """Asked the first time on a machine, this compiles the library, which takes seconds."""
    if library() is None:
        return _CPU
    return replace(
        _CPU,
        decode=paged_decode_attention_native,
        prefill=paged_prefill_attention_native,
        rotate_write=rotate_write_native,
        rms_norm=rms_norm_native,
        add_rms_norm=add_rms_norm_native,
        gated_activation=gated_activation_native,
        latent_decode=latent_decode_native,
        latent_prefill=latent_prefill_native,
    )
