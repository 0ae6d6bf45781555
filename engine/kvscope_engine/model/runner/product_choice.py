"""Chooses between the project's kernels and cuBLAS for a model's matrix products with few rows.

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
def choose_products(module: nn.Module, tell: Callable[[str], object], clock: Clock = time_by_graphs) -> str:
    """Time each weight shape and set the chosen implementation on every layer.

    `tell` is called with a description of each trial. Returns a one-line summary; empty if there was nothing to choose.
    """
    shapes: dict[tuple[int, int, torch.dtype], list[FusedLinear | Float32Head]] = defaultdict(list)
    for part in module.modules():
        if isinstance(part, FusedLinear | Float32Head) and _is_open(part.weight):
            dtype = torch.float32 if isinstance(part, Float32Head) else part.weight.dtype
            shapes[*part.weight.shape, dtype].append(part)
    words = []
    for (outputs, inputs, dtype), parts in shapes.items():
        tell(f"timing products with {outputs:,} x {inputs:,} weights")
        times = times_against_torch([part.weight for part in parts], dtype, clock)
        for part in parts:
            part.few_rows = times.few_rows
        words.append(f"{outputs} x {inputs} {_taken(times.single)} and {_taken(times.several)}")
    if not words:
        return ""
    return f"products of one row and of 2 to 16, our kernels' time over cuBLAS's: {'; '.join(words)}"


def is_timed_at_load(device: torch.device) -> bool:
    """Whether the kernels have not been measured on such a device and are therefore timed at load."""
    return device.type == "cuda" and default_few_rows(compute_capability(device)) == NEVER


def _is_open(weight: torch.Tensor) -> bool:
    """Whether a kernel can compute this product and it is unknown whether it is faster."""
    return supports_product(weight) and is_timed_at_load(weight.device)


def _taken(ratio: float) -> str:
    if ratio == float("inf"):
        return "not run"
    return f"{ratio:.2f}"
