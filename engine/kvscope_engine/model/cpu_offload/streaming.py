"""Layers that run on weights in host memory: each is copied to the device while the one before it runs.

Owns two stages on the device and what is in them. A layer's weights are views of one stage for good, every second
layer's of the same, so that nothing is exchanged when it runs: it waits until its weights are there. When it is done,
the copy of the layer after next begins into its stage, on a stream of its own, and behind the last layer that of the
first two: these come while the layers run that are on the device.

accelerate's `cpu_offload` and `dispatch_model` are not used. Their hooks take the place of each module's `forward` and
put its parameters in there and then: from memory that is not pinned, on the stream that computes, nothing fetched
ahead. And joined layers use weights past these hooks (`forward_add`; norms that are kept apart): tried on a joined
Llama, its logits were others, without an error. One hook a decoder layer does here, since every weight of two axes is
read inside its layer's call.

The copies are not part of CUDA graphs: such a layer comes in milliseconds, and its ten launches take a fraction of one.
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
"""Of a weight in its stage, in bytes; as torch's allocator has it."""
EAGER_NOTE: Final = (
    "steps run without CUDA graphs (as with --enforce-eager): weights are streamed from host memory (--cpu-offload-gb)"
)


class StreamedWeights:
    """The layers whose weights stay on the host, in the order in which they run. `close` when no step is under way.

    Raises KvscopeError where there is no host memory for them.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, streams: Streams, pinner: Pinner | None
    ) -> None:
        self._streams = streams
        self._slabs: list[HostSlab] = []
        """A layer each, so that at no time all weights are there twice."""
        sizes = [_staged_bytes(layer) for layer in layers]
        self._stages = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(NUM_STAGES)]
        self._holds: list[int | None] = [None] * NUM_STAGES
        self._ready: list[StreamMark | None] = [None] * NUM_STAGES
        self._used: list[StreamMark | None] = [None] * NUM_STAGES
        self._handles: list[Any] = []
        self.notes: list[str] = [EAGER_NOTE] if device.type == "cuda" else []
        try:
            for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
                self._slabs.append(_slab(size, pinner))
                self._settle(index, layer)
        except BaseException:
            self.close()
            raise
        self.notes += [slab.note for slab in self._slabs if slab.note][:1]

    @property
    def num_bytes(self) -> int:
        """In host memory."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def pass_bytes(self) -> int:
        """Copied to the device for each forward pass: of a layer that shares its stage with no other, nothing."""
        shared = [slab for index, slab in enumerate(self._slabs) if self._following(index) != index]
        return sum(slab.num_bytes for slab in shared)

    @property
    def stage_bytes(self) -> int:
        """On the device."""
        return sum(stage.nbytes for stage in self._stages)

    def close(self) -> None:
        """Give the memory back; the layers cannot run any more."""
        for handle in self._handles:
            handle.remove()
        self._streams.finish("copy")
        for slab in self._slabs:
            slab.close()
        self._handles, self._slabs, self._stages = [], [], []

    def _settle(self, index: int, layer: nn.Module) -> None:
        """Move a layer's weights into its slab, and let it read its stage."""
        host, stage = self._slabs[index].rows[0], self._stages[index % NUM_STAGES]
        views: dict[int, torch.Tensor] = {}
        offset = 0
        for held, name, tensor in large_tensors(layer):
            if id(tensor) not in views:
                end = offset + tensor.nbytes
                host[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                views[id(tensor)] = like(tensor, stage[offset:end].view(tensor.dtype).view(tensor.shape))
                offset = _aligned(end)
            held[name] = views[id(tensor)]
        self._handles += [
            layer.register_forward_pre_hook(partial(self._before, index)),
            layer.register_forward_hook(partial(self._after, index)),
        ]

    def _before(self, index: int, *_: Any) -> None:
        stage = index % NUM_STAGES
        if self._holds[stage] != index:  # the first pass, or one after a pass that was broken off
            self._used[stage] = self._streams.mark("compute")
            self._begin(index)
        ready = self._ready[stage]
        assert ready is not None, "a stage that holds a layer was copied to"
        self._streams.wait("compute", ready)

    def _after(self, index: int, *_: Any) -> None:
        stage = index % NUM_STAGES
        self._used[stage] = self._streams.mark("compute")
        following = self._following(index)
        if following != index:
            self._begin(following)

    def _following(self, index: int) -> int:
        """The layer that is next in the same stage, in this pass or the one after it."""
        after_next = index + NUM_STAGES
        return after_next if after_next < len(self._slabs) else index % NUM_STAGES

    def _begin(self, index: int) -> None:
        """Copy a layer as soon as its stage is not read any more."""
        number = index % NUM_STAGES
        used, source = self._used[number], self._slabs[index].rows[0]
        target = self._stages[number][: len(source)]

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        if used is not None:
            self._streams.wait("copy", used)
        self._holds[number] = None  # until all of this was handed over
        self._streams.run("copy", copy)
        self._ready[number] = self._streams.mark("copy")
        self._holds[number] = index


def start_streaming(module: nn.Module) -> None:
    """Once a model is joined: serve those layers that were kept in host memory from there. Others: nothing."""
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
    """Those of `module`, when it is served from host memory in part."""
    streamed: StreamedWeights | None = getattr(module, "kvscope_streamed", None)
    return streamed


def close_streaming(module: nn.Module) -> None:
    """At the model's end, or that of its start, wherever it broke off."""
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
