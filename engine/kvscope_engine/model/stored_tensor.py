"""Stand-ins for tensors of safetensors files: data is read on request, and each stand-in records whether it was
read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(slots=True)
class StoredTensor:
    """Stand-in for a tensor while transformers loads weights. Indexing it with `[...]` reads the data."""

    name: str
    dtype: str
    """Name of the dtype in the file, such as BF16."""
    num_bytes: int
    shape: tuple[int, ...]
    file_slice: Any
    """safetensors' view of the tensor in the memory-mapped file; creating it reads no data."""
    was_read: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        tensor: torch.Tensor = self.file_slice[index]
        return tensor

    def read(self) -> torch.Tensor:
        return self[...]


@dataclass(slots=True)
class ComputedTensor:
    """Stand-in with the interface of `StoredTensor`, whose data is computed from other tensors."""

    compute: Callable[[], torch.Tensor]
    was_read: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        return self.compute()[index]


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of all `files` by name. The files must have been validated."""
    from safetensors import safe_open

    tensors: dict[str, StoredTensor] = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        for name, entry in _entries(path).items():
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensors[name] = StoredTensor(name, entry["dtype"], end - start, shape, file.get_slice(name))
    return tensors


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """Return the JSON header's description of each tensor. A safetensors file begins with the length of that header."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
