"""Chooses between kvscope's kernels and cuBLAS for a model's matmuls with few rows.

On GPUs for which the kernels have not been measured, each weight shape is timed at the start. The choice is made once,
before CUDA graphs are captured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from kvscope_engine.model.layers.fused.float32_head import Float32Head
from kvscope_engine.model.layers.fused.packed_linear import FusedLinear
from kvscope_kernels.launch import compute_capability
from kvscope_kernels.linear.choice import Clock, time_by_graphs, times_against_torch
from kvscope_kernels.linear.skinny_linear import NEVER, default_few_rows, supports_product


@torch.inference_mode()
def choose_matmul_kernels(module: nn.Module, report: Callable[[str], object], clock: Clock = time_by_graphs) -> str:
    """Time the matmul of each weight shape with both implementations, and set the faster one on every layer.

    `report` is called with a description of each trial. Returns a one-line summary; empty if nothing was timed.
    """
    shapes: dict[tuple[int, int, torch.dtype], list[FusedLinear | Float32Head]] = defaultdict(list)
    for submodule in module.modules():
        if isinstance(submodule, FusedLinear | Float32Head) and _needs_timing(submodule.weight):
            dtype = torch.float32 if isinstance(submodule, Float32Head) else submodule.weight.dtype
            shapes[*submodule.weight.shape, dtype].append(submodule)
    texts = []
    for (outputs, inputs, dtype), linears in shapes.items():
        report(f"timing products with {outputs:,} x {inputs:,} weights")
        times = times_against_torch([submodule.weight for submodule in linears], dtype, clock)
        for submodule in linears:
            submodule.few_rows = times.few_rows
        texts.append(f"{outputs} x {inputs} {_ratio_text(times.single)} and {_ratio_text(times.several)}")
    if not texts:
        return ""
    return f"products of one row and of 2 to 16, our kernels' time over cuBLAS's: {'; '.join(texts)}"


def is_timed_at_load(device: torch.device) -> bool:
    """Whether matmuls are timed at load, because the kernels have not been measured on GPUs of the same kind as
    `device`.
    """
    return device.type == "cuda" and default_few_rows(compute_capability(device)) == NEVER


def _needs_timing(weight: torch.Tensor) -> bool:
    return supports_product(weight) and is_timed_at_load(weight.device)


def _ratio_text(ratio: float) -> str:
    if ratio == float("inf"):
        return "not run"
    return f"{ratio:.2f}"
