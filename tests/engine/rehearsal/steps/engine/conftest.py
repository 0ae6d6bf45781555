"""A whole engine on the emulated GPU: weights from files, lower tiers, and streams that only count.

Real are the files of weights and of the disk tier, the host tier's data as seen by the host, and the policy. Copies
are counted by the current stream and by whether the host side is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import core_model_loading

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.model import tensor_agreement
from kvscope_engine.model.cpu_offload import streaming
from kvscope_engine.model.device_memory import step_buffer
from kvscope_engine.model.device_memory.gpu_holders import GpuHolders
from kvscope_engine.model.kv_cache.kv_offload import tier_builder
from kvscope_engine.model.layers.lora import lora_adapters
from kvscope_engine.model.loader import model_loader
from kvscope_engine.model.runner import pool_size
from kvscope_engine.model.tensor_agreement import Difference
from kvscope_engine.model.verification import eager_check

GIB = 1 << 30
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


class FakeStream:
    """A stream; `waits` counts how often the host waited for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits = 0
        self.waited_for = 0

    def wait_event(self, _: Any) -> None:
        self.waited_for += 1

    def synchronize(self) -> None:
        self.waits += 1


class StreamRecorder(TorchDispatchMode):
    """Records each copy between host and device with its stream, and what captured graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.copy = FakeStream("compute"), FakeStream("copy")
        self.current = self.compute
        self.copied: list[tuple[str, str]] = []
        """(lane, "up" or "down")"""
        self.num_waited = 0
        """Copies that the host waits for: it asked to, or its side of them is not pinned."""
        self.pinned: set[int] = set()
        self.read_by_graphs: set[int] = set()
        """Storages that captured work uses and did not make itself."""
        self._made: set[int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.note_reads((args, kwargs))
        result = func(*args, **kwargs)
        if self._made is not None:
            self._made |= set(map(storage_of, tensors_in(result))) - self.read_by_graphs
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            into = func is torch.ops.aten.copy_.default
            is_async = kwargs.get("non_blocking", args[2] if into and len(args) > 2 else False)
            self._note_copy(args[1] if into else args[0], result, is_async)
        return result

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Emulate `torch.cuda.stream`."""
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Emulate a graph capture."""
        self._made = set()
        yield
        self._made = None

    def note_reads(self, arguments: Any) -> None:
        """Record what an operation or a launch reads."""
        if self._made is not None:
            self.read_by_graphs |= set(map(storage_of, tensors_in(arguments))) - self._made

    def clear(self) -> None:
        """Forget the recorded copies."""
        self.copied.clear()
        self.num_waited = self.copy.waits = self.compute.waits = 0

    def _note_copy(self, source: torch.Tensor, target: torch.Tensor, is_async: bool) -> None:
        if source.device.type == target.device.type:
            return
        host = source if target.is_cuda else target
        self.copied.append((self.current.name, "up" if target.is_cuda else "down"))
        self.num_waited += not is_async or storage_of(host) not in self.pinned


class PinnedMemory(TorchFunctionMode):
    """Treats memory as pinned if pinned memory was requested."""

    def __init__(self, lanes: StreamRecorder) -> None:
        super().__init__()
        self._lanes = lanes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if is_pinned:
            self._lanes.pinned.add(storage_of(result))
        return result


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the GPU tensors in a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key that is equal for views of the same memory."""
    return tensor.untyped_storage()._cdata


class FakeHostSlab:
    """A host tier with real host memory, while device copies have shapes only."""

    note = ""
    is_pinned = True

    def __init__(self, lanes: StreamRecorder, num_places: int, block_bytes: int, pinner: Any) -> None:
        assert pinner is not None, "a GPU's host tier is to be pinned"
        self.num_bytes = self.real_bytes = num_places * block_bytes
        self.rows: Any = torch.empty(num_places, block_bytes, dtype=torch.uint8)
        bytes_of_host = np.zeros((num_places, block_bytes), np.uint8)
        self.rows.numpy = lambda: bytes_of_host
        lanes.pinned.add(storage_of(self.rows))

    def close(self) -> None: ...


class UnusedGpuMemory:
    """Device memory of a given size, of which nothing is used."""

    total_bytes = 24 * GIB
    num_multiprocessors = 132
    compute_capability = 90
    holders = GpuHolders("")

    def __init__(self, _: torch.device) -> None: ...

    def free_bytes(self) -> int:
        return 23 * GIB

    def held_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 1 << 20

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def reserved_bytes(self) -> int:
        return 0

    def promised_bytes(self) -> int:
        return 0

    def draws_display(self) -> bool:
        return False


@pytest.fixture
def lanes(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamRecorder]:
    """Streams and everything else that an engine uses of CUDA."""
    from triton.runtime.jit import JITFunction

    lanes, launch, capture, pin = StreamRecorder(), JITFunction.run, torch.cuda.graph, step_buffer.pinned_bytes

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        lanes.note_reads(args)
        launch(kernel, *args, **kwargs)

    @contextmanager
    def capturing(graph: Any, **options: Any) -> Iterator[None]:
        with capture(graph, **options), lanes.captured():
            yield

    def pinned(num_bytes: int) -> tuple[torch.Tensor, Any]:
        tensor, array = pin(num_bytes)
        lanes.pinned.add(storage_of(tensor))
        return tensor, array

    monkeypatch.setattr(JITFunction, "run", launched)
    monkeypatch.setattr(step_buffer, "pinned_bytes", pinned)
    for name, stand_in in {
        "Stream": lambda *device: lanes.copy if device else FakeStream("capture"),
        "current_stream": lambda _: lanes.current,
        "stream": lanes.on,
        "graph": capturing,
        "memory_reserved": lambda _: 0,
        "is_bf16_supported": lambda **_: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with lanes, PinnedMemory(lanes):
        yield lanes


@pytest.fixture
def start_engine(
    fake_gpu: Any, lanes: StreamRecorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """Function that starts an engine from a folder of weights, with every graph captured.

    Verification compares nothing, since nothing is computed.
    """
    engines: list[Engine] = []
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0)  # a tensor with a single number would really be copied
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads would not use this mode
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_loader, "choose_device", lambda _: gpu)
    monkeypatch.setattr(lora_adapters, "choose_device", lambda _: gpu)
    monkeypatch.setattr(model_loader, "CudaMemory", UnusedGpuMemory)
    monkeypatch.setattr(pool_size, "CudaMemory", UnusedGpuMemory)
    monkeypatch.setattr(eager_check, "difference", lambda *_: Difference(0.0, 0.0, 0.0))
    monkeypatch.setattr(tensor_agreement, "relative_rms_error", lambda *_: 0.0)
    monkeypatch.setattr(tier_builder, "HostSlab", partial(FakeHostSlab, lanes))
    monkeypatch.setattr(streaming, "HostSlab", partial(FakeHostSlab, lanes))
    monkeypatch.setattr(core_model_loading, "_materialize_copy", read_shape)
    folder = checkpoint(tmp_path)

    def make(**options: Any) -> Engine:
        small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 256, "max_num_seqs": 8}
        engines.append(Engine(EngineConfig(**({"model": str(folder), "device": "cuda"} | small | options))))
        graphs = engines[-1].components.runner._graphs
        with torch.inference_mode():
            for size in graphs.sizes[:-1] if graphs is not None else ():
                graphs.capture(size)
        return engines[-1]

    make.folder = folder  # type: ignore[attr-defined]
    make.checkpoint = partial(checkpoint, tmp_path)  # type: ignore[attr-defined]
    yield make
    for engine in engines:
        engine.close()


def read_shape(slice_of_file: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Read a weight as transformers does: shape and dtype from the file, then on the device with the given dtype."""
    shape, kind = slice_of_file.get_shape(), {"F32": torch.float32, "BF16": torch.bfloat16}[slice_of_file.get_dtype()]
    return torch.empty(shape, dtype=kind).to(device=device, dtype=dtype)


def checkpoint(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """Write a checkpoint with real weights, outside of the emulation."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with _disable_current_modes(), unset_fake_temporarily():
        model = auto.from_config(AutoConfig.for_model(model_type, **SIZES | changes), dtype=torch.float32)
        model.save_pretrained(folder / model_type)
    return folder / model_type
