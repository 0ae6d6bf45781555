"""A GPU emulated by shapes and dtypes alone, with an account of the memory it would use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvscope_engine.model.device_memory.gpu_holders import GpuHolders
from kvscope_kernels import Ops
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.fused_moe.expert_weights import ExpertWeights
from kvscope_kernels.linear.skinny_linear import FewRows
from kvscope_kernels.rotate_write import Rotation

GIB = 1 << 30
DEVICE = torch.device("cuda:0")
GRANULE = 512
"""Granularity of allocations in bytes, as in torch's allocator."""
CONTEXT_BYTES = 500 << 20
"""Bytes used by the driver for a process that uses CUDA."""


class GpuMemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of GPU tensors as operations make and free them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self._count(leaf.untyped_storage())
        return result

    def reset_peak(self) -> None:
        """Restart the peak from what is held now."""
        self.peak = self.held

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


class FakeIndexing(TorchFunctionMode):
    """Implements indexing and copying by other operations, because torch's own first ask the driver for the current
    device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BY_OTHER_MEANS and any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args[:2]):
            return _BY_OTHER_MEANS[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, picked = _view(tensor, index)
    return torch.ops.aten.index(view, picked) if any(p is not None for p in picked) else view


def _set(tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, picked = _view(tensor, index)
    if any(p is not None for p in picked):
        torch.ops.aten.index_put_(view, picked, value)
    elif isinstance(value, torch.Tensor):
        _copy(view, value)
    else:
        view.fill_(value)


def _view(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Apply slices, numbers and None. Returns the view and the remaining index tensors per axis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts[at : at + 1] = [slice(None)] * missing
    axis, picked = 0, list[torch.Tensor | None]()
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(part, int):
            tensor = tensor.select(axis, part)
            continue
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice(tensor, axis, part.start, part.stop, part.step or 1)
        else:
            rows = part if isinstance(part, torch.Tensor) else torch.tensor(part)
            picked += [None] * (axis - len(picked)) + [rows.to(tensor.device)]
        axis += 1
    return tensor, picked


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.ops.aten.copy_.default(tensor, source, non_blocking)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def address(tensor: torch.Tensor) -> int:
    """Return an address that no other storage has."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


_BY_OTHER_MEANS: Final[dict[Any, Callable[..., Any]]] = {
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.Tensor.copy_: _copy,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.data_ptr: address,
    torch.Tensor.__invert__: torch.ops.aten.bitwise_not.default,
}


@dataclass
class FakeGpu:
    """A GPU of `total_bytes`, as a `DeviceMemory`."""

    total_bytes: int
    num_multiprocessors: int = 128
    compute_capability: int = 89
    ledger: GpuMemoryLedger = field(default_factory=GpuMemoryLedger)
    promised: int = 0
    draws: bool = False
    holders: GpuHolders = field(default_factory=lambda: GpuHolders(""))

    def free_bytes(self) -> int:
        return self.total_bytes - CONTEXT_BYTES - self.ledger.held

    def held_bytes(self) -> int:
        return self.ledger.held

    def reset_peak(self) -> None:
        self.ledger.reset_peak()

    def peak_bytes(self) -> int:
        return self.ledger.peak

    def empty_cache(self) -> None:
        """Do nothing: no unused memory is kept."""

    def reserved_bytes(self) -> int:
        return self.ledger.held

    def promised_bytes(self) -> int:
        return self.promised

    def draws_display(self) -> bool:
        return self.draws


def shape_true_ops() -> Ops:
    """Return stand-ins for the kernels that return results of the right shape only."""

    def attend(args: AttentionArgs, *_: Any) -> torch.Tensor:
        return args.out_or_new()

    def rotate_write(heads: torch.Tensor, rotation: Rotation, *_: Any) -> torch.Tensor:
        return torch.empty_like(heads[:, : rotation.num_heads])

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(x, dtype=dtype)

    def add_rms_norm(
        x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(x, dtype=dtype)

    def gated_activation(both: torch.Tensor, kind: int) -> torch.Tensor:
        return torch.empty_like(both[..., : both.shape[-1] // 2])

    def linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        few_rows: FewRows | None = None,
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], len(weight)), dtype=dtype or x.dtype)

    def mix_experts(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        inner = x.new_empty(ids.numel(), weights.down.shape[2])  # existing tensors are counted as well
        parts = x.new_empty(ids.numel(), x.shape[1])
        return torch.empty_like(x) if len(inner) == len(parts) else x

    return Ops(
        kv_write=lambda *a, **k: None,
        decode=attend,
        prefill=attend,
        copy_rows=lambda *a: None,
        rotate_write=rotate_write,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        gated_activation=gated_activation,
        linear=linear,
        mix_experts=mix_experts,
        allow_tokens=lambda *a: None,
        draw_tokens=lambda logits, options, keys, rows: torch.empty_like(keys),
        block_bounds=lambda *a: None,
        block_scores=lambda *a, **k: None,
        latent_decode=attend,
        latent_prefill=attend,
    )


@pytest.fixture
def indexing() -> type[FakeIndexing]:
    """The class `FakeIndexing`, for tests that count other things than bytes."""
    return FakeIndexing


@pytest.fixture
def ledger() -> GpuMemoryLedger:
    """Account of bytes on the GPU, active while it is entered."""
    return GpuMemoryLedger()


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Function that returns a context with an emulated GPU of the given size, on which verification finds no
    difference.
    """
    from kvscope_engine.model import tensor_agreement
    from kvscope_engine.model.layers.fused import float32_head, fused_experts, fused_mlp, fused_norm, packed_linear
    from kvscope_engine.model.tensor_agreement import Difference
    from kvscope_engine.model.verification import eager_check, fuse, hook_check
    from kvscope_engine.model.verification.layer_trace import Trace

    @contextmanager
    def gpu(total_bytes: int, runs_proofs: bool = True) -> Iterator[FakeGpu]:
        if not runs_proofs:
            monkeypatch.setattr(hook_check, "check_equals_eager", lambda *_: None)
            monkeypatch.setattr(fuse, "whole_trace", lambda *_: Trace())
            monkeypatch.setattr(fuse, "fault_of", lambda *_: "")
        monkeypatch.setattr(eager_check, "difference", lambda *_: Difference(0.0, 0.0, 0.0))
        monkeypatch.setattr(tensor_agreement, "relative_rms_error", lambda *_: 0.0)
        for module in (eager_check, fused_norm, fused_mlp, fused_experts, packed_linear, float32_head):
            monkeypatch.setattr(module, "ops_for", lambda _: shape_true_ops())
        monkeypatch.setattr(fused_experts, "to_mxfp4", lambda weight: None)  # it looks at numbers
        card = FakeGpu(total_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(card.compute_capability, 10))
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(card.ledger)
            stack.enter_context(FakeIndexing())
            yield card

    return gpu
