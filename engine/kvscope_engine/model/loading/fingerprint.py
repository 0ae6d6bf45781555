"""What tells one set of weights from another: for KV that outlives the process that computed it."""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import nn

SAMPLES: Final = 16
"""Numbers of each tensor that are looked at: another checkpoint of the same shape differs in all of them."""


@torch.inference_mode()
def weights_fingerprint(module: nn.Module) -> str:
    """A digest over names, shapes, dtypes and a few numbers of each tensor of the model. Reads little of it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        digest.update(flat[::step][:SAMPLES].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()
