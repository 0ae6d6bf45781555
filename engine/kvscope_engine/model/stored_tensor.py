"""Tensors of safetensors files that are read on request and record whether they were."""

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
    """Stands in for a tensor while transformers loads weights; indexing it with `[...]` reads the data."""

    name: str
    dtype: str
    """Name of the dtype in the file, such as BF16."""
    num_bytes: int
    shape: tuple[int, ...]
    part: Any
    """View of the file by safetensors: memory-mapped, not read."""
    was_read: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        found: torch.Tensor = self.part[index]
        return found

    def read(self) -> torch.Tensor:
        return self[...]


@dataclass(slots=True)
class MadeTensor:
    """A stand-in like `StoredTensor` for a tensor computed from others."""

    make: Callable[[], torch.Tensor]
    was_read: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        return self.make()[index]


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of all `files` by name. The files must have been validated."""
    from safetensors import safe_open

    found: dict[str, StoredTensor] = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        for name, entry in _entries(path).items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            found[name] = StoredTensor(name, entry["dtype"], end - begin, shape, file.get_slice(name))
    return found


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """Return the file's header entry of each tensor. A file begins with the length of its JSON header."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
