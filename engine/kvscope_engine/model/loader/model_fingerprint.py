"""Fingerprint that identifies a model, for KV that outlives the process that computed it.

The fingerprint covers the whole configuration, every byte of every weight, and the versions of the code that computes
with them. Checksums are computed on the weights' device. Must not depend on files or blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

KV_VERSION: Final = 2
"""Version of the meaning of a KV block's contents; increase it when the meaning changes and the layout does not."""
CPU_CHUNK_WORDS: Final = 1 << 15
"""Number of 64-bit words processed at a time on a CPU, few enough for a core's cache."""
GPU_CHUNK_WORDS: Final = 1 << 22
"""Number of 64-bit words processed at a time on a GPU: enough to occupy it, with temporaries of 32 MiB."""
_KEY_MULTIPLIER: Final = -7046029254386353131
_MIX_MULTIPLIER: Final = -4658895280553007687
_IGNORED_KEYS: Final = frozenset({"_name_or_path", "architectures", "transformers_version"})
"""Configuration keys that identify a model's origin and do not affect its computations."""


def model_fingerprint(module: nn.Module) -> str:
    """Return a hash of the configuration, all weights, and the versions of transformers and torch."""
    from transformers import __version__

    config: Any = module.config
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{KV_VERSION};{__version__};{torch.__version__};{config_text(config)};".encode())
    for name, tensor in _tensors(module):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor_sum(tensor)};".encode())
    return digest.hexdigest()


def config_text(config: Any) -> str:
    """Return a canonical text of all configuration keys that affect computations."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _IGNORED_KEYS}
    return json.dumps(fields, sort_keys=True, default=repr)


@torch.inference_mode()
def tensor_sum(tensor: torch.Tensor) -> int:
    """Return a 64-bit checksum of the tensor's bytes and their positions.

    Every change of a single word changes the checksum.
    """
    words = _words(tensor)
    size = CPU_CHUNK_WORDS if tensor.device.type == "cpu" else GPU_CHUNK_WORDS
    keys = torch.arange(min(size, len(words)), dtype=torch.int64, device=tensor.device) * _KEY_MULTIPLIER
    chunks = enumerate(words[start : start + size] for start in range(0, len(words), size))
    sums = [_mixed_sum(chunk, keys[: len(chunk)] + _as_int64(number * _MIX_MULTIPLIER)) for number, chunk in chunks]
    return int(torch.stack(sums).sum()) if sums else 0


def _mixed_sum(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of all words, each scrambled with its position. Every operation except the sum is invertible."""
    mixed = keys.add_(words)
    mixed ^= (mixed >> 32) & 0xFFFF_FFFF
    mixed *= _MIX_MULTIPLIER
    mixed ^= (mixed >> 29) & 0x7_FFFF_FFFF
    return mixed.sum()


def _as_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View the tensor's bytes as int64, padded with zeros. The bytes are copied only if they are not aligned to
    8 bytes.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    over = len(content) % 8
    if over or content.storage_offset() % 8:
        content = torch.nn.functional.pad(content, (0, -over % 8)).clone()
    return content.view(torch.int64)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, including non-persistent ones; shared tensors once."""
    yield from sorted(module.named_parameters())
    yield from sorted(module.named_buffers())
