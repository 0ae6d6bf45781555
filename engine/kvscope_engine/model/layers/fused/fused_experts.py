"""Computes the experts of an MoE layer as one device operation that never reads expert ids on the host, so that CUDA
graphs can capture it.

An expert module of transformers is recognized by the attributes that `use_experts_implementation` sets, and its gate
function by the function's outputs. Routing and shared experts remain transformers' code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.tensor_agreement import is_close
from kvscope_kernels import ops_for
from kvscope_kernels.fused_moe.expert_weights import RELU_SQUARED, ExpertWeights, Gate, Mxfp4Weight, to_mxfp4
from kvscope_kernels.gated_activation import GELU_TANH, SILU

TENSORS: Final = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
"""Names of the tensors of a transformers expert module that `FusedExperts` uses."""
_ALPHAS: Final = ("alpha", "swiglu_alpha")
_LIMITS: Final = ("limit", "swiglu_limit")


class FusedExperts(nn.Module):
    """Replaces an expert module of transformers, with the same call signature."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.gate, self.is_packed = weights.gate, isinstance(weights.down, Mxfp4Weight)
        self.up, self.up_powers = _weight_parameters(weights.up)
        self.down, self.down_powers = _weight_parameters(weights.down)
        self.up_bias = None if weights.up_bias is None else _parameter(weights.up_bias)
        self.down_bias = None if weights.down_bias is None else _parameter(weights.down_bias)
        self._ops = ops_for(self.down.device.type)

    @property
    def num_weights(self) -> int:
        """Number of weights, regardless of their bit width."""
        return (self.up.numel() + self.down.numel()) * (1 + self.is_packed)

    @property
    def weights(self) -> ExpertWeights:
        """Weights at their current addresses. They must not be cached, because weights that are streamed from
        host memory move between buffers.
        """
        up, down = self.up, self.down
        if self.up_powers is None or self.down_powers is None:
            return ExpertWeights(up, down, self.up_bias, self.down_bias, self.gate)
        packed = Mxfp4Weight(up, self.up_powers), Mxfp4Weight(down, self.down_powers)
        return ExpertWeights(*packed, self.up_bias, self.down_bias, self.gate)

    def in_four_bits(self) -> FusedExperts | None:
        """Return the same experts in MXFP4, in a quarter of the memory; None if MXFP4 cannot represent each weight
        exactly.
        """
        up = to_mxfp4(self.up)
        down = None if up is None else to_mxfp4(self.down)
        return None if up is None or down is None else FusedExperts(self.weights._replace(up=up, down=down))

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: (tokens, hidden).
            ids: Experts of each token, (tokens, top_k).
            shares: Routing weights of these experts, (tokens, top_k).

        Returns:
            (tokens, hidden).
        """
        return self._ops.mix_experts(hidden_states, ids, shares, self.weights)


def experts_candidate(part: Any) -> FusedExperts | None:
    """Return `part` as `FusedExperts`; None if it is not a supported expert module, or its gate function is unknown."""
    if not hasattr(part, "has_gate") or not hasattr(part, "_apply_gate") or part.has_post_expert_norm:
        return None
    if part._is_expert_parallel:
        return None
    up = getattr(part, "gate_up_proj" if part.has_gate else "up_proj", None)
    down = getattr(part, "down_proj", None)
    if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor) or not up.dim() == down.dim() == 3:
        return None
    gate = gate_of(part, up.device)
    if gate is None:
        return None
    up_bias = getattr(part, "gate_up_proj_bias" if part.has_gate else "up_proj_bias") if part.has_bias else None
    down_bias = part.down_proj_bias if part.has_bias else None
    if part.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if part.has_gate and not part.is_concatenated:
        up = torch.cat((up[:, ::2], up[:, 1::2]), 1)
        up_bias = None if up_bias is None else torch.cat((up_bias[:, ::2], up_bias[:, 1::2]), 1)
    weights = ExpertWeights(up.contiguous(), down.contiguous(), up_bias, down_bias, gate)
    try:
        weights.check()
    except ValueError:
        return None
    return FusedExperts(weights)


def is_faster_on(device: torch.device) -> bool:
    """Whether fused experts are faster on `device` than transformers' implementation of experts.

    They are faster on GPUs only. On a CPU, transformers uses torch's grouped matmul, which is faster than the loop over
    experts of `FusedExperts`: mostly 1.0 to 1.5 times, in 15 of 16 pairs of runs (1 to 128 tokens, 16 and 32 experts,
    float32 and bfloat16, one core).
    """
    return device.type == "cuda"


def gate_of(part: Any, device: torch.device) -> Gate | None:
    """Return the gate function that has a kernel and whose outputs equal those of `part` for small and large inputs;
    None if there is no such function.
    """
    small = torch.linspace(-12.0, 12.0, 97, device=device)
    large = torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4], device=device)
    probes = [torch.cartesian_prod(numbers, numbers) for numbers in (small, large)] if part.has_gate else [small, large]
    try:
        outputs = [part._apply_gate(probe.clone()) if part.has_gate else part.act_fn(probe.clone()) for probe in probes]
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    return next(
        (gate for gate in _gates(part) if is_close(outputs, [gate.apply(probe) for probe in probes], 1e-6)), None
    )


def _gates(part: Any) -> Iterator[Gate]:
    if not part.has_gate:
        yield Gate(RELU_SQUARED)
        return
    yield from (Gate(SILU), Gate(GELU_TANH))
    limit, alpha = (_number(part, names) for names in (_LIMITS, _ALPHAS))
    if limit is not None:
        yield from (Gate(SILU, limit=limit), Gate(GELU_TANH, limit=limit))
        yield Gate(SILU, 1.0 if alpha is None else alpha, limit, 1.0)


def _number(part: Any, names: tuple[str, ...]) -> float | None:
    value = next((getattr(part, name) for name in names if hasattr(part, name)), None)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _weight_parameters(weight: torch.Tensor | Mxfp4Weight) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return plain weights as (parameter, None), and 4-bit weights as (codes, powers)."""
    if isinstance(weight, Mxfp4Weight):
        return _parameter(weight.codes), _parameter(weight.powers)
    return _parameter(weight), None


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach(), requires_grad=False)
