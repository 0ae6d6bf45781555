"""Weights that are no numbers: looked for when a model's results are wrong, as reading all of them takes time."""

from __future__ import annotations

import torch
from torch import nn


@torch.inference_mode()
def bad_weight(module: nn.Module) -> str | None:
    """The first weight that holds NaN or infinity, and which; None when all are finite."""
    for name, tensor in module.named_parameters():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            what = "NaN" if bool(tensor.isnan().any()) else "infinity"
            return f"{name} holds {what}"
    return None
