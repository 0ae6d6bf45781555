"""Replaces model parts of known structure by fused ones, each checked to be equivalent first.

Decides the order of replacement. A module keeps its position and class; its `forward` becomes that of the fused part,
stored as its `kvscope_fused`, and its plain weights are released. Each part is replaced before the next is fused, so
that only one part at a time has its weights in memory twice. A part that is not equivalent stays unchanged. At the end,
the whole model is compared with the original.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch
from torch import nn

from kvscope_engine.model.cpu_offload.resident_layer import load_layer_of
from kvscope_engine.model.layers.attention.mla.latents import latents_of
from kvscope_engine.model.layers.attention.paged_attention import layer_of
from kvscope_engine.model.layers.attention.position_cache import counts_positions
from kvscope_engine.model.layers.fused.compiled_layer import compile_layers
from kvscope_engine.model.layers.fused.fused_attention import attention_candidates
from kvscope_engine.model.layers.fused.fused_experts import TENSORS, FusedExperts, experts_candidate, is_faster_on
from kvscope_engine.model.layers.fused.fused_layer import FusedLayer, chain_layers, layer_candidate
from kvscope_engine.model.layers.fused.fused_mlp import mlp_candidate
from kvscope_engine.model.layers.fused.fused_norm import norm_candidates
from kvscope_engine.model.layers.fused.packed_linear import can_pack, pack_fused, pack_linears
from kvscope_engine.model.layers.fused.round_linears import round_linears
from kvscope_engine.model.layers.own_forward import OwnForward, own_forward
from kvscope_engine.model.layers.recurrent.recurrent_layers import recurrent_layers
from kvscope_engine.model.verification.eager_check import FUSED_SLACK, NUM_NUDGES, first_fault, paged_trace
from kvscope_engine.model.verification.hook_check import check_hook, pop_plain_trace
from kvscope_engine.model.verification.layer_trace import Trace, nudged
from kvscope_engine.model.verification.passed_checks import PassedChecks
from kvscope_engine.model.verification.trial import Trial, run_trial
from kvscope_telemetry.errors import BadInput

LOW_PRECISION: Final = (torch.bfloat16, torch.float16)
_FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


@dataclass(frozen=True, slots=True)
class FusedCounts:
    """Number of replaced parts by kind, and how linear layers and the residual are computed."""

    attentions: int
    mlps: int
    norms: int
    layers: int
    packed: bool
    float32_residual: bool
    int8: int = 0
    """Number of linear layers with 8-bit weights."""
    int4: int = 0
    """Number of linear layers with 4-bit weights."""
    experts: int = 0
    """Number of layers with experts that run as one operation."""
    packed_experts: int = 0
    """Number of layers counted in `experts` whose experts have the 4-bit weights of the checkpoint."""


def fuse_model(module: nn.Module, quantization: str = "none", passed: PassedChecks | None = None) -> FusedCounts:
    """Replace the parts that have equivalent fused ones, in place. Further calls return the first result.

    With a `quantization` other than "none", weights are rounded last, after all checks (`round_linears`). If `passed`
    has a record of the model, parts are replaced according to it without comparing their results.

    Raises:
        BadInput: The architecture's attention is not supported (`hook_check`), or the fused model gives other results
            than before. The message names the architecture.
    """
    counts: FusedCounts | None = getattr(module, "kvscope_fused_model", None)
    if counts is None:
        passed = passed or PassedChecks()
        check_hook(module, passed)
        own = own_forward(module)
        counts = _fuse(module, quantization, passed) if own is None else _round_own(module, own, quantization)
        module.kvscope_fused_model = counts  # type: ignore[assignment]
    return counts


def _fuse(module: nn.Module, quantization: str, passed: PassedChecks) -> FusedCounts:
    parameter = next(module.parameters())
    dtype, device = parameter.dtype, parameter.device
    packed = quantization == "none" and can_pack(dtype, device)
    del parameter
    plain = None if passed.record is not None else pop_plain_trace(module) or whole_trace(module)
    trial = run_trial(module, passed)
    with torch.no_grad():
        attentions = _fuse_each(module, lambda part: _fuse_attention(part, trial, packed))
        _fuse_each(module, _split_latents)
        mlps = _fuse_each(module, lambda part: _fuse_mlp(part, trial, packed))
        experts = _fuse_each(module, lambda part: _fuse_experts(part, trial))
        norms = _fuse_each(module, lambda part: _fuse_norm(part, trial))
        layers = _fuse_each(module, lambda part: _fuse_layer(part, trial))
        chain_layers(module)
        if packed:
            pack_linears(module, trial.calls)
    is_whole = layers == len(check_hook(module)) and not recurrent_layers(module).layers
    if plain is not None:
        float32_residual = is_whole and _keep_residual_in_float32(module, plain)
        if not float32_residual:
            _check_fused_model(module, plain)
        passed.store(float32_residual=float32_residual)
    elif float32_residual := is_whole and passed.record is not None and passed.record.float32_residual:
        _set_float32_residual(module, keeps_float32=True)
    bits = Counter[int]() if quantization == "none" else round_linears(module, trial.calls, quantization)
    if not packed and can_pack(dtype, device):
        pack_fused(module)
        pack_linears(module, trial.calls)
    compile_layers(module)
    return FusedCounts(
        attentions, mlps, norms, layers, packed, float32_residual, bits[8], bits[4], experts, _num_packed(module)
    )


def _round_own(module: nn.Module, own: OwnForward, quantization: str) -> FusedCounts:
    bits = Counter[int]() if quantization == "none" else round_linears(module, own.called, quantization)
    if bits:
        try:
            own.record_layers()
        except _FAILURES as error:
            line = f"{type(error).__name__}: {' '.join(str(error).split()):.160}"
            raise BadInput(
                f"quantization={quantization!r} is not accepted with {type(module).__name__}, which is run by"
                f" transformers' own code ({line})"
            ) from error
    return FusedCounts(0, 0, 0, 0, packed=False, float32_residual=False, int8=bits[8], int4=bits[4])


def _fuse_each(module: nn.Module, fuse: Callable[[nn.Module], bool]) -> int:
    # Weak references, so that modules released with their parent are freed, with their weights.
    references, count = [ref(submodule) for submodule in module.modules()], 0
    for reference in references:
        if (submodule := reference()) is not None:
            load_layer_of(module, submodule)
            count += fuse(submodule)
    return count


def _fuse_attention(part: nn.Module, trial: Trial, packed: bool) -> bool:
    recorded = trial.context.layers.get(layer_of(part)) if hasattr(part, "layer_idx") else None
    if recorded is None or part not in trial.calls or counts_positions(part):
        return False
    for candidate in attention_candidates(part, recorded[1], packed):
        if trial.proves(part, candidate):
            replace_part(part, candidate, "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            return True
    return False


def _split_latents(part: nn.Module) -> bool:
    latents = latents_of(part)
    if latents is None:
        return False
    latents.split()
    return True


def _fuse_mlp(part: nn.Module, trial: Trial, packed: bool) -> bool:
    candidate = mlp_candidate(part, packed) if part in trial.calls else None
    if candidate is None or not trial.proves(part, candidate):
        return False
    replace_part(part, candidate, "gate_proj", "up_proj", "down_proj")
    return True


def _fuse_experts(part: nn.Module, trial: Trial) -> bool:
    parameter = next(part.parameters(recurse=False), None)
    if parameter is None or part not in trial.calls or not is_faster_on(parameter.device):
        return False
    unpacked = experts_candidate(part)
    packed = None if unpacked is None else unpacked.in_four_bits()
    for candidate in (packed, unpacked):
        if candidate is not None and trial.proves(part, candidate, has_known_bounds=True):
            replace_part(part, candidate)
            for name in TENSORS:
                part._parameters.pop(name, None)
            return True
    return False


def _num_packed(module: nn.Module) -> int:
    return sum(isinstance(part, FusedExperts) and part.is_packed for part in module.modules())


def _fuse_norm(part: nn.Module, trial: Trial) -> bool:
    for candidate in norm_candidates(part):
        if trial.proves(part, candidate):
            replace_part(part, candidate)
            return True
    return False


def _fuse_layer(part: nn.Module, trial: Trial) -> bool:
    candidate = layer_candidate(part)
    if candidate is None or not trial.proves(part, candidate):
        return False
    replace_part(part, candidate)
    return True


def _keep_residual_in_float32(module: nn.Module, plain: Trace) -> bool:
    """Keep the residual stream in float32 if the model's results stay correct. Returns whether it is kept.

    All layers must be fused.
    """
    if next(module.parameters()).dtype not in LOW_PRECISION:
        return False
    _set_float32_residual(module, keeps_float32=True)
    if not fault_of(module, plain):
        return True
    _set_float32_residual(module, keeps_float32=False)
    return False


def _set_float32_residual(module: nn.Module, *, keeps_float32: bool) -> None:
    parts = [getattr(submodule, "kvscope_fused", None) for submodule in module.modules()]
    for layer in parts:
        if isinstance(layer, FusedLayer):
            layer.keeps_float32 = keeps_float32


def _check_fused_model(module: nn.Module, plain: Trace) -> None:
    fault = fault_of(module, plain)
    if fault:
        raise BadInput(
            f"model architecture {type(module).__name__} is not supported: with its fused layers, the results "
            f"differ ({fault})"
        )


def whole_trace(module: nn.Module, forced: Trace | None = None) -> Trace:
    calls = check_hook(module)
    return paged_trace(module, [call.shape for call in calls], [call.location for call in calls], forced)


def fault_of(module: nn.Module, plain: Trace) -> str:
    """Describe the first difference between the model's results and `plain`, the trace before fusion; empty if there is
    none.

    An error of the model is returned as text, except a lack of GPU memory, which is raised.
    """
    dtype = next(module.parameters()).dtype
    try:
        fused_trace = whole_trace(module, plain)
        fault = first_fault(fused_trace, plain, FUSED_SLACK)
        if fault and dtype in LOW_PRECISION:
            nudged_traces = [whole_trace(module, nudged(plain, dtype, seed)) for seed in range(NUM_NUDGES)]
            fault = first_fault(fused_trace, plain, FUSED_SLACK, nudged_traces)
        return fault
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        return f"{type(error).__name__}: {' '.join(str(error).split()):.160}"


def replace_part(part: nn.Module, fused: Any, *released: str) -> None:
    part.kvscope_fused = fused
    part.forward = fused.forward if isinstance(fused, nn.Module) else fused
    for name in released:
        part._modules.pop(name, None)
