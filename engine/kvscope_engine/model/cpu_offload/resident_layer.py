"""Brings layers whose weights are in host memory to the device one at a time, while a model is checked and fused at
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
    """Keeps at most one of `layers` on `device`. Its hooks remain on the layers until `end`."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.device = device
        self._here: nn.Module | None = None
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensor on the device and the host tensor that it copies, by the id of the former."""
        self._handles = [layer.register_forward_pre_hook(self._before) for layer in self.layers]

    def bring_layer_of(self, part: nn.Module) -> None:
        """Copy the layer that contains `part` to the device, if it is one of `layers`."""
        for layer in self.layers:
            if any(part is child for child in layer.modules()):
                self._bring(layer)

    def end(self) -> None:
        """Move everything back to host memory and remove the hooks."""
        self._put_away()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, layer: nn.Module, _: Any) -> None:
        self._bring(layer)

    def _bring(self, layer: nn.Module) -> None:
        if layer is self._here:
            return
        self._put_away()
        for held, name, tensor in large_tensors(layer):
            held[name] = brought = like(tensor, tensor.detach().to(self.device, copy=True))
            self._originals[id(brought)] = brought, tensor
        self._here = layer

    def _put_away(self) -> None:
        if self._here is None:
            return
        for held, name, tensor in large_tensors(self._here):
            _, original = self._originals.get(id(tensor), (None, None))
            held[name] = like(tensor, tensor.detach().to("cpu")) if original is None else original
        self._originals.clear()
        self._here = None


def bring_layer_of(module: nn.Module, part: nn.Module) -> None:
    """Bring the layer of `part` to the device, before `part` of the model `module` is run by itself."""
    resident: ResidentLayers | None = getattr(module, "kvscope_resident", None)
    if resident is not None:
        resident.bring_layer_of(part)
