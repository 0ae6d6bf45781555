"""Counts the bytes of live tensors by kind while torch runs, with or without data.

A storage is counted once, however many tensors view it, from the operation that created it until its last reference is
dropped. Bytes are those requested from torch's allocator, without rounding and unused memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer states"
ACTIVATIONS: Final = "activations"
KINDS: Final = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS)
"""All kinds of tensors. Tensors that were not assigned to another kind are activations."""


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors that operations create while the mode is active.

    `shares` is the fraction of each kind that this device stores; kinds that are missing are stored whole.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shares = dict.fromkeys(KINDS, 1.0) | dict(shares or {})
        self._storages: dict[int, tuple[str, int]] = {}
        self._bytes = dict.fromkeys(KINDS, 0.0)
        self.peak: dict[str, float] = dict(self._bytes)
        """Bytes by kind at the moment when their sum was largest."""

    @property
    def live_bytes(self) -> dict[str, float]:
        return dict(self._bytes)

    @property
    def peak_bytes(self) -> int:
        return round(sum(self.peak.values()))

    def reset_peak(self) -> None:
        self.peak = self.live_bytes

    def assign(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Assign the storages of `tensors` to a kind. Storages created outside the mode are counted from then on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            previous = self._storages.get(storage._cdata)
            if previous is None:
                self._add(kind, storage)
            elif previous[0] != kind:
                self._bytes[previous[0]] -= previous[1] * self._shares[previous[0]]
                self._bytes[kind] += previous[1] * self._shares[kind]
                self._storages[storage._cdata] = (kind, previous[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(ACTIVATIONS, storage)
        return result

    def _add(self, kind: str, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._storages[key] = (kind, size)
        self._bytes[kind] += size * self._shares[kind]
        weakref.finalize(storage, self._drop_freed, key).atexit = False
        if sum(self._bytes.values()) > sum(self.peak.values()):
            self.peak = dict(self._bytes)

    def _drop_freed(self, key: int) -> None:
        kind, size = self._storages.pop(key)
        self._bytes[kind] -= size * self._shares[kind]
