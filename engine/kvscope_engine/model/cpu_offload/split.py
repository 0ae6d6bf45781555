"""Chooses which layers' weights stay in host memory (`--cpu-offload-gb`), and moves all others to the device.

Whole decoder layers are chosen from the last one backwards, until their weights reach the requested size. Embeddings,
head and all one-dimensional tensors (norms, biases) are always on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kvscope_telemetry.errors import BadInput, KvscopeError

GIB = 1 << 30
NUM_STAGES = 2
"""Number of layers on the device at the same time: the running one and the next one."""

TensorEntry = tuple[dict[str, Any], str, torch.Tensor]
"""The dictionary in which a tensor is registered, its name there, and the tensor."""


def check_streaming(cpu_offload_gb: float, device: torch.device, free_host_bytes: int) -> None:
    """Check, before anything is loaded, that weights can stay in host memory.

    Raises:
        BadInput: `device` is a CPU.
        KvscopeError: Less than `cpu_offload_gb` of host memory is free.
    """
    if device.type == "cpu":
        raise BadInput(
            f"cpu_offload_gb={cpu_offload_gb:g} is not accepted on a CPU: its weights are in host memory already"
        )
    num_bytes = cpu_offload_gb * GIB
    if num_bytes > free_host_bytes:
        raise KvscopeError(
            f"no host memory for --cpu-offload-gb {cpu_offload_gb:g}: {free_host_bytes / GIB:.1f} GiB are free"
        )


def layers_for_host(module: nn.Module, cpu_offload_gb: float) -> tuple[nn.Module, ...]:
    """Return the layers whose weights stay in host memory, in execution order.

    Raises:
        BadInput: No device memory would be freed, or the model's layers are not in one list.
    """
    layers, num_bytes = _decoder_layers(module), cpu_offload_gb * GIB
    chosen: list[nn.Module] = []
    while len(chosen) < len(layers) and sum(map(large_bytes, chosen)) < num_bytes:
        chosen.insert(0, layers[-1 - len(chosen)])
    sizes = [large_bytes(layer) for layer in chosen]
    if sum(sizes) <= NUM_STAGES * max(sizes):
        raise BadInput(
            f"cpu_offload_gb={cpu_offload_gb:g} is not accepted: a layer of this model takes {max(sizes) / GIB:.2g} GiB"
            f" and {NUM_STAGES} are on the GPU while they run, so that nothing is freed: set more than"
            f" {NUM_STAGES * max(sizes) / GIB:.2g}, or 0"
        )
    return tuple(chosen)


def move_others(module: nn.Module, on_host: Sequence[nn.Module], device: torch.device) -> None:
    """Move all of `module` to `device` except the large tensors of the layers `on_host`. Shared tensors stay shared."""
    host_ids = {id(tensor) for layer in on_host for _, _, tensor in large_tensors(layer)}
    moved: dict[int, torch.Tensor] = {}
    for registry, name, tensor in tensors_of(module):
        if id(tensor) not in host_ids:
            if id(tensor) not in moved:
                moved[id(tensor)] = like(tensor, tensor.detach().to(device))
            registry[name] = moved[id(tensor)]


def tensors_of(module: nn.Module) -> Iterator[TensorEntry]:
    for part in module.modules():
        for registry in (part._parameters, part._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None:
                    yield registry, name, tensor


def large_tensors(layer: nn.Module) -> Iterator[TensorEntry]:
    """Yield the layer's tensors to stream: those with at least two dimensions."""
    return (entry for entry in tensors_of(layer) if entry[2].dim() > 1)


def large_bytes(layer: nn.Module) -> int:
    """Return the bytes of a layer's large tensors, counting shared ones once."""
    return sum({id(tensor): tensor.nbytes for _, _, tensor in large_tensors(layer)}.values())


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` as a Parameter if `tensor` is one, else as a plain tensor."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    config: Any = module.config
    count = int(config.get_text_config(decoder=True).num_hidden_layers)
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    layers = next(lists, None)
    if layers is None:
        raise BadInput(f"--cpu-offload-gb is not accepted for {type(module).__name__}: its layers are not in one list")
    return list(layers)  # by position: their names may skip numbers
