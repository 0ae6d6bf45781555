"""The most bytes that operations hold at once beside what was there before, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def workspace_bytes(run: Callable[[], object]) -> int:
    """Of tensors that `run` makes, its result among them; what one operation holds inside itself is not seen."""
    storages = _Storages()
    with storages:
        run()
    return int(storages.peak)


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._note(leaf.untyped_storage(), 0)  # it was there before
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._note(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        self._known.add(storage._cdata)
        self._held += size
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._end, storage._cdata, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._held -= size
