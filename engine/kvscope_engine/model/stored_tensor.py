"""Tensors of safetensors files that are read when they are asked for, and know whether they were."""

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
    """Takes the place of a tensor where transformers loads weights: it asks for `[...]`."""

    name: str
    dtype: str
    """As the file calls it, such as BF16."""
    num_bytes: int
    shape: tuple[int, ...]
    part: Any
    """safetensors' own view of the file: mapped, not read."""
    was_read: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        found: torch.Tensor = self.part[index]
        return found

    def read(self) -> torch.Tensor:
        """All of it."""
        return self[...]


@dataclass(slots=True)
class MadeTensor:
    """The same for one that is made of others."""

    make: Callable[[], torch.Tensor]
    was_read: bool = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        return self.make()[index]


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Those of all `files`, which have been checked, by their names."""
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
    """What the file says of each tensor. It begins with the length of its JSON."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
