"""Runs layers whose weights are in host memory: each is copied to the device while the previous one runs.

Owns two stages (buffers) on the device and their contents. Every second layer shares a stage, and its weights are
permanent views of it, so that no tensor is replaced when a layer runs; the layer only waits for its copy. When it is
done, the layer after next is copied into its stage on a separate stream. After the last layers, the first two are
copied for the next pass.

accelerate's `cpu_offload` and `dispatch_model` are not used. Their hooks replace each module's `forward` and load its
parameters on demand: from unpinned memory, on the compute stream, without prefetching. Fused layers also read weights
without triggering these hooks (`forward_add`; separate norms): on a fused Llama, the logits were wrong without an
error. Here, one hook per decoder layer suffices, since every weight with two or more dimensions is read inside its
layer's call.

CUDA graphs are not used, because they would save little: copying a layer takes milliseconds, and launching its ten
kernels only a fraction of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.cpu_offload.resident_layer import ResidentLayers
from kvscope_engine.model.cpu_offload.split import NUM_STAGES, large_tensors, like
from kvscope_engine.model.device_memory.device_streams import CudaStreams, StreamMark, Streams
from kvscope_engine.model.device_memory.host_slab import CudaPinner, HostSlab, Pinner
from kvscope_telemetry.errors import BadInput, KvscopeError

ALIGNMENT: Final = 512
"""Alignment of a weight in its stage in bytes, as in torch's allocator."""
EAGER_NOTE: Final = (
    "steps run without CUDA graphs (as with --enforce-eager): weights are streamed from host memory (--cpu-offload-gb)"
)


class StreamedWeights:
    """Streams layers whose weights are in host memory, in execution order. Call `close` only when no step is in flight.

    Raises KvscopeError if too little host memory is free.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, streams: Streams, pinner: Pinner | None
    ) -> None:
        self._streams = streams
        self._slabs: list[HostSlab] = []
        """One slab per layer, so that the weights of at most one layer exist twice during the transfer."""
        sizes = [_staged_bytes(layer) for layer in layers]
        self._stages = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(NUM_STAGES)]
        self._staged_layers: list[int | None] = [None] * NUM_STAGES
        self._copy_marks: list[StreamMark | None] = [None] * NUM_STAGES
        self._compute_marks: list[StreamMark | None] = [None] * NUM_STAGES
        self._handles: list[Any] = []
        self.notes: list[str] = [EAGER_NOTE] if device.type == "cuda" else []
        try:
            for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
                self._slabs.append(_slab(size, pinner))
                self._attach_layer(index, layer)
        except BaseException:
            self.close()
            raise
        self.notes += [slab.note for slab in self._slabs if slab.note][:1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the streamed weights in host memory."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def pass_bytes(self) -> int:
        """Bytes copied to the device per forward pass. A layer that shares its stage with no other is copied only
        once."""
        shared = [slab for index, slab in enumerate(self._slabs) if self._next_in_stage(index) != index]
        return sum(slab.num_bytes for slab in shared)

    @property
    def stage_bytes(self) -> int:
        """Bytes of both stages on the device."""
        return sum(stage.nbytes for stage in self._stages)

    def close(self) -> None:
        """Free the memory. The layers cannot run afterwards."""
        for handle in self._handles:
            handle.remove()
        self._streams.finish("copy")
        for slab in self._slabs:
            slab.close()
        self._handles, self._slabs, self._stages = [], [], []

    def _attach_layer(self, index: int, layer: nn.Module) -> None:
        """Copy a layer's large weights to its slab in host memory, and replace them by views of its stage on the
        device.
        """
        host, stage = self._slabs[index].rows[0], self._stages[index % NUM_STAGES]
        views: dict[int, torch.Tensor] = {}
        offset = 0
        for registry, name, tensor in large_tensors(layer):
            if id(tensor) not in views:
                end = offset + tensor.nbytes
                host[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                views[id(tensor)] = like(tensor, stage[offset:end].view(tensor.dtype).view(tensor.shape))
                offset = _aligned(end)
            registry[name] = views[id(tensor)]
        self._handles += [
            layer.register_forward_pre_hook(partial(self._before, index)),
            layer.register_forward_hook(partial(self._after, index)),
        ]

    def _before(self, index: int, *_: Any) -> None:
        stage = index % NUM_STAGES
        if self._staged_layers[stage] != index:  # first pass, or the previous pass was interrupted
            self._compute_marks[stage] = self._streams.mark("compute")
            self._enqueue_copy(index)
        ready = self._copy_marks[stage]
        assert ready is not None, "a stage that holds a layer was copied to"
        self._streams.wait("compute", ready)

    def _after(self, index: int, *_: Any) -> None:
        stage = index % NUM_STAGES
        self._compute_marks[stage] = self._streams.mark("compute")
        following = self._next_in_stage(index)
        if following != index:
            self._enqueue_copy(following)

    def _next_in_stage(self, index: int) -> int:
        after_next = index + NUM_STAGES
        return after_next if after_next < len(self._slabs) else index % NUM_STAGES

    def _enqueue_copy(self, index: int) -> None:
        """Enqueue the copy of a layer's weights, to run once its stage is no longer read."""
        stage = index % NUM_STAGES
        used, source = self._compute_marks[stage], self._slabs[index].rows[0]
        target = self._stages[stage][: len(source)]

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        if used is not None:
            self._streams.wait("copy", used)
        self._staged_layers[stage] = None  # unknown until the copy is enqueued completely
        self._streams.run("copy", copy)
        self._copy_marks[stage] = self._streams.mark("copy")
        self._staged_layers[stage] = index


def start_streaming(module: nn.Module) -> None:
    """Stream the layers that are in host memory, once the model is fused. Does nothing for a model without such
    layers."""
    resident: ResidentLayers | None = getattr(module, "kvscope_resident", None)
    if resident is None:
        return
    resident.end()
    module.kvscope_resident = None  # type: ignore[assignment]
    streams, pinner = CudaStreams(resident.device), CudaPinner() if resident.device.type == "cuda" else None
    module.kvscope_streamed = StreamedWeights(  # type: ignore[assignment]
        resident.layers, resident.device, streams, pinner
    )


def streamed_weights(module: nn.Module) -> StreamedWeights | None:
    streamed: StreamedWeights | None = getattr(module, "kvscope_streamed", None)
    return streamed


def close_streaming(module: nn.Module) -> None:
    """Free the weights in host memory when the model is closed, or when its start failed at any point."""
    resident: ResidentLayers | None = getattr(module, "kvscope_resident", None)
    if resident is not None:
        resident.end()
        module.kvscope_resident = None  # type: ignore[assignment]
    streamed = streamed_weights(module)
    if streamed is not None:
        streamed.close()
        module.kvscope_streamed = None  # type: ignore[assignment]


def _slab(num_bytes: int, pinner: Pinner | None) -> HostSlab:
    try:
        return HostSlab(1, num_bytes, pinner)
    except (BadInput, OSError, MemoryError) as error:
        raise KvscopeError(
            "no host memory for the weights that stay there: give a smaller --cpu-offload-gb, or close other programs"
        ) from error


def _staged_bytes(layer: nn.Module) -> int:
    sizes = {id(tensor): tensor.nbytes for _, _, tensor in large_tensors(layer)}
    return sum(map(_aligned, sizes.values()))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
