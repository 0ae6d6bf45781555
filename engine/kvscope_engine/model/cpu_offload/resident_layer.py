"""Moves layers whose weights are in host memory to the device one at a time, while a model is checked and fused at
load.

At most one of these layers is on the device. A layer is copied there when it runs or when one of its modules is
accessed, and the previous one is moved back, including weights that were replaced (fused) in between. Slow and simple;
during service, `streaming` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.cpu_offload.split import large_tensors, like


class ResidentLayers:
    """Keeps at most one of `layers` on `device`, through forward hooks that `end` removes."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.device = device
        self._resident: nn.Module | None = None
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """For each tensor on the device, by its id: the tensor, and the host tensor from which it was copied."""
        self._handles = [layer.register_forward_pre_hook(self._before) for layer in self.layers]

    def load_layer_of(self, part: nn.Module) -> None:
        """Copy the layer that contains `part` to the device, if it is one of `layers`."""
        for layer in self.layers:
            if any(part is child for child in layer.modules()):
                self._load(layer)

    def end(self) -> None:
        """Move everything back to host memory and remove the hooks."""
        self._unload()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, layer: nn.Module, _: Any) -> None:
        self._load(layer)

    def _load(self, layer: nn.Module) -> None:
        if layer is self._resident:
            return
        self._unload()
        for registry, name, tensor in large_tensors(layer):
            registry[name] = on_device = like(tensor, tensor.detach().to(self.device, copy=True))
            self._originals[id(on_device)] = on_device, tensor
        self._resident = layer

    def _unload(self) -> None:
        if self._resident is None:
            return
        for registry, name, tensor in large_tensors(self._resident):
            _, original = self._originals.get(id(tensor), (None, None))
            registry[name] = like(tensor, tensor.detach().to("cpu")) if original is None else original
        self._originals.clear()
        self._resident = None


def load_layer_of(module: nn.Module, part: nn.Module) -> None:
    """Copy the layer that contains `part` to the device, before `part` of the model `module` is called outside of its
    layer.
    """
    resident: ResidentLayers | None = getattr(module, "kvscope_resident", None)
    if resident is not None:
        resident.load_layer_of(part)
