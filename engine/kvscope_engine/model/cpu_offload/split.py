"""Which layers' weights stay in host memory (`--cpu-offload-gb`), and the placing of all others. Owns the choice.

Whole decoder layers from the last one back, until their weights reach what was asked for. Embeddings, head and all that
has one axis (norms, biases) are on the device always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kvscope_telemetry.errors import BadInput, KvscopeError

GIB = 1 << 30
NUM_STAGES = 2
"""Layers that are on the device at once: the one that runs, and the one that comes next."""

Place = tuple[dict[str, Any], str, torch.Tensor]
"""Where a tensor is registered, under which name, and the tensor."""


def check_streaming(cpu_offload_gb: float, device: torch.device, free_host_bytes: int) -> None:
    """Raise, on one line, where weights cannot stay in host memory: before anything is loaded."""
    if device.type == "cpu":
        raise BadInput(
            f"cpu_offload_gb={cpu_offload_gb:g} is not accepted on a CPU: its weights are in host memory already"
        )
    asked = cpu_offload_gb * GIB
    if asked > free_host_bytes:
        raise KvscopeError(
            f"no host memory for --cpu-offload-gb {cpu_offload_gb:g}: {free_host_bytes / GIB:.1f} GiB are free"
        )


def layers_for_host(module: nn.Module, cpu_offload_gb: float) -> tuple[nn.Module, ...]:
    """The layers whose weights stay, in the order in which they run.

    Raises BadInput where that would free nothing, or where the model's layers are not one list.
    """
    layers, wanted = _decoder_layers(module), cpu_offload_gb * GIB
    chosen: list[nn.Module] = []
    while len(chosen) < len(layers) and sum(map(large_bytes, chosen)) < wanted:
        chosen.insert(0, layers[-1 - len(chosen)])
    sizes = [large_bytes(layer) for layer in chosen]
    if sum(sizes) <= NUM_STAGES * max(sizes):
        raise BadInput(
            f"cpu_offload_gb={cpu_offload_gb:g} is not accepted: a layer of this model takes {max(sizes) / GIB:.2g} GiB"
            f" and {NUM_STAGES} are on the GPU while they run, so that nothing is freed: give more than"
            f" {NUM_STAGES * max(sizes) / GIB:.2g}, or 0"
        )
    return tuple(chosen)


def place_others(module: nn.Module, on_host: Sequence[nn.Module], device: torch.device) -> None:
    """Move all of `module` to `device` but the large tensors of those layers; what is shared stays shared."""
    stays = {id(tensor) for layer in on_host for _, _, tensor in large_tensors(layer)}
    moved: dict[int, torch.Tensor] = {}
    for held, name, tensor in tensors_of(module):
        if id(tensor) not in stays:
            if id(tensor) not in moved:
                moved[id(tensor)] = like(tensor, tensor.detach().to(device))
            held[name] = moved[id(tensor)]


def tensors_of(module: nn.Module) -> Iterator[Place]:
    """All parameters and buffers."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    yield held, name, tensor


def large_tensors(layer: nn.Module) -> Iterator[Place]:
    """Those that are worth streaming: of two axes and more."""
    return (place for place in tensors_of(layer) if place[2].dim() > 1)


def large_bytes(layer: nn.Module) -> int:
    """Bytes of them, what is shared counted once."""
    return sum({id(tensor): tensor.nbytes for _, _, tensor in large_tensors(layer)}.values())


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` as what `tensor` is: a parameter, or none."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    config: Any = module.config
    count = int(config.get_text_config(decoder=True).num_hidden_layers)
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    found = next(lists, None)
    if found is None:
        raise BadInput(f"--cpu-offload-gb is not accepted for {type(module).__name__}: its layers are not in one list")
    return list(found)  # by their order: their names may leave numbers out
