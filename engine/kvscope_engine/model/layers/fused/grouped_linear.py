"""Linear layers on quantized weights: integers of 4 or 8 bits with a scale per group, or FP8. The quantized weights are
read from the checkpoint or computed at load.

Quantization changes a layer's results, so `fuse` does not compare these layers with the original ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.fused.released_weight import ReleasedWeight
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.grouped_product import GroupedProduct, grouped_product
from kvscope_kernels.quantized_linear.fp8 import Fp8Weight, GpuFp8, fp8_product
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight


class GroupedLinear(nn.Module):
    """Linear layer `x @ weight.T + bias` with a group-quantized or FP8 weight. Inference only."""

    fuses_add: Final = True

    def __init__(
        self,
        plain: Any,
        weight: GroupedWeight | Fp8Weight,
        dtype: torch.dtype | None = None,
        buffer: WeightBuffer | None = None,
        *,
        rounds_activations: bool = False,
    ) -> None:
        """Create the replacement of the layer `plain`.

        Args:
            dtype: Dtype of the result; None for the dtype of the input.
            buffer: Allocator that the layers of a model on a CPU share for their quantized weights.
            rounds_activations: Whether activations are rounded to 8 bits. For FP8, it applies on any device; for other
                weights, on a CPU only.
        """
        super().__init__()
        self.out_features, self.in_features = plain.weight.shape
        self.weight = ReleasedWeight(plain.weight)
        self.bias = plain.bias
        self.bits = 8 if isinstance(weight, Fp8Weight) else weight.bits
        self._dtype = dtype
        device = plain.weight.device
        self.grouped: GroupedProduct
        if isinstance(weight, Fp8Weight):
            self.grouped = fp8_product(weight, plain.bias, device, rounds_activations=rounds_activations)
        else:
            self.grouped = grouped_product(weight, plain.bias, device, buffer, rounds_activations=rounds_activations)
        for number, tensor in enumerate(self.grouped.tensors):  # counted with the model's memory
            self.register_buffer(f"grouped_{number}", tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped.product(x, dtype=self._dtype)

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return `forward(x) + other`, in the dtype of `other`, which has the result's shape."""
        return self.grouped.product(x, other)

    def on_failure(self, report: Callable[[str], object]) -> None:
        """Set the callback for a failure of torch's FP8 matmul. It is called with one line of text, and never
        for other weights than FP8 on a GPU.
        """
        if isinstance(self.grouped, GpuFp8):
            self.grouped.on_failure(report)
