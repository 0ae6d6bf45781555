"""Lists which implementation each operation uses on a given device and model, and why.

Only collects rows. The decisions are made at load where the operations are created: per device in
`kvscope_kernels.dispatch`, for linear layers, quantized weights and experts in `model.layers.fused` and the loader. The
table calls the same decision functions, so that it agrees with what runs. The table depends on a model's dtypes and not
on its weights: a layer that `verification.fuse` cannot prove equal, and a model that runs transformers' own code, keep
that code whatever the table shows.
"""

from __future__ import annotations

from typing import Final

import torch

from kvscope_engine.model.layers.fused.fused_experts import is_faster_on
from kvscope_engine.model.layers.fused.packed_linear import packing_refusal
from kvscope_engine.model.loader.quantization_choice import quantization_refusal
from kvscope_engine.model.platforms.device import choose_device, choose_dtype, dtype_name
from kvscope_engine.model.runner.product_choice import is_timed_at_load
from kvscope_kernels import Ops, ops_for
from kvscope_kernels.cpu.grouped import min_tile_rows
from kvscope_kernels.cpu.layer import layer_refusal
from kvscope_kernels.cpu.library import library_refusal
from kvscope_kernels.dispatch import explain_ops
from kvscope_kernels.grouped_product import grouped_implementation
from kvscope_kernels.linear.skinny_linear import MAX_ROWS
from kvscope_kernels.operation_row import TRITON, C, Operands, OperationChoice
from kvscope_kernels.quantized_linear.fp8 import fp8_implementation
from kvscope_kernels.third_party_attention.library_choice import importable
from kvscope_telemetry.errors import BadInput

ONEDNN: Final = "oneDNN"
TRANSFORMERS: Final = "transformers"
REFUSED: Final = "refused"
AT_LOAD: Final = "timed at load"
_GROUPED_REASONS: Final = {TRITON: "the device is a CUDA GPU", C: "compiled for this CPU"}
HEAD_DIM: Final = 128
"""Head dimension assumed for the table of a machine, which has no model: the most common one."""


def machine_table() -> tuple[str, tuple[OperationChoice, ...]]:
    """Return the default implementations on this machine: a title, and one row per operation.

    Raises RuntimeError if a GPU would be used and Triton is not installed.
    """
    try:
        device = choose_device("auto")
    except BadInput:  # a GPU that is too old: the engine runs with `--device cpu`
        device = torch.device("cpu")
    dtype = choose_dtype("auto", device)
    operands = Operands(dtype, dtype, HEAD_DIM, HEAD_DIM)
    title = f"Operations on {device.type} in {dtype_name(dtype)}, with a KV cache of that type and heads of {HEAD_DIM}"
    return title, operation_table(device, ops_for(device.type), operands)


def operation_table(device: torch.device, ops: Ops, operands: Operands) -> tuple[OperationChoice, ...]:
    """Return a table row for each operation of a model with these `operands`, for a runner that uses `ops`."""
    rows = explain_ops(ops, operands)
    rows["linear"] = _linear(rows["linear"], device, operands.dtype)
    rows["mix_experts"] = _experts(rows["mix_experts"], device)
    rows["prefill"] = _prefill(rows["prefill"])
    quantized = tuple(_quantized(quantization, device, operands.dtype) for quantization in ("int8", "int4", "fp8"))
    return (*rows.values(), _as_stored(device, operands.dtype), *quantized, _whole_layer(device, operands))


def _prefill(row: OperationChoice) -> OperationChoice:
    """Return `row`, the table row of kvscope's prefill kernels. If other attention libraries are installed,
    returns a row that says that the implementation is chosen by timing at load.
    """
    libraries = importable() if row.implementation == TRITON else ()
    if not libraries:
        return row
    return OperationChoice(
        row.operation, AT_LOAD, f"{row.implementation} or {', '.join(libraries)}, whichever is faster"
    )


def _linear(row: OperationChoice, device: torch.device, dtype: torch.dtype) -> OperationChoice:
    refusal = packing_refusal(dtype, device)
    if not refusal:
        return OperationChoice(row.operation, ONEDNN, "weights are packed at load")
    if device.type == "cpu":
        return OperationChoice(row.operation, row.implementation, refusal)
    if is_timed_at_load(device):
        reason = (
            f"up to {MAX_ROWS} rows: {TRITON} or cuBLAS, whichever is faster; more rows, or --deterministic: cuBLAS"
        )
        return OperationChoice(row.operation, AT_LOAD, reason)
    return OperationChoice(row.operation, row.implementation, f"for up to {MAX_ROWS} rows; cuBLAS for more")


def _experts(row: OperationChoice, device: torch.device) -> OperationChoice:
    if is_faster_on(device):
        return row
    return OperationChoice(row.operation, TRANSFORMERS, "torch's grouped product is faster on a CPU")


def _as_stored(device: torch.device, dtype: torch.dtype) -> OperationChoice:
    """Return the table row of matmuls with the quantized weights of a checkpoint and unrounded activations."""
    operation = "linear with weights as stored"
    implementation = grouped_implementation(device.type)
    rows = min_tile_rows() if implementation == C and dtype == torch.bfloat16 else 0
    reason = _GROUPED_REASONS.get(implementation) or library_refusal()
    tiles = f"; AMX tiles from {rows} rows on, with the same bits" if rows else ""
    return OperationChoice(operation, implementation, reason + tiles)


def _quantized(quantization: str, device: torch.device, dtype: torch.dtype) -> OperationChoice:
    operation = f"{quantization} linear"
    if refusal := quantization_refusal(quantization, device, dtype):
        return OperationChoice(operation, REFUSED, f"not accepted{refusal}")
    if quantization == "fp8":
        return OperationChoice(operation, *fp8_implementation(device))
    implementation = grouped_implementation(device.type)
    return OperationChoice(operation, implementation, _GROUPED_REASONS.get(implementation) or library_refusal())


def _whole_layer(device: torch.device, operands: Operands) -> OperationChoice:
    """Return the table row of decoder layers that run in one call, which only CPUs support."""
    operation = "whole decoder layer"
    refusal = (
        layer_refusal(operands.dtype, operands.dtype, operands.cache_dtype)
        if device.type == "cpu"
        else "only CPUs run a layer in one call"
    )
    if refusal:
        return OperationChoice(operation, "operation by operation", refusal)
    return OperationChoice(operation, C, "in steps that only decode, for layers whose weights have 8 or 4 bits")
