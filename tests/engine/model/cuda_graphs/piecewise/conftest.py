"""CUDA graphs emulated on a CPU: operations are recorded during a capture and repeated in replays.

The emulation is as strict as a GPU: a capture computes nothing (its results are poisoned at its end) and refuses to
read data on the host, and memory freed during a capture is poisoned at that point in each replay.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures
from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import PiecewiseGraphs
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_kernels import Ops, dispatch

READS_DATA: Final = frozenset(
    {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}
)
BUFFER_BYTES: Final = 1 << 20


class CaptureMemory:
    """Which tensors of a capture are still in use, by their storage."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._known: set[int] = set()
        self.steps: list[Callable[[], None]] = []
        """Steps of the graph that is being captured, or was captured last."""

    def own(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._known

    def watch(self, tensor: torch.Tensor, is_new: bool) -> None:
        """Poison the tensor in the replay at the point where it is freed."""
        key = storage_of(tensor)
        if is_new:
            self._known.add(key)
        if key in self._known:
            self._users[key] += 1
            weakref.finalize(tensor, self._end, key, alias(tensor))

    def _end(self, key: int, kept: torch.Tensor) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.steps.append(lambda: poison(kept))


class OperationTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations done while it is active."""

    def __init__(self, memory: CaptureMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.steps: list[Callable[[], None]] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS_DATA or _picks_by_mask(func, args):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation now and in each replay."""
        given = set(map(storage_of, tensors((args, kwargs))))
        held_args, held_kwargs = tree_map(alias, (args, kwargs))
        result = func(*args, **kwargs)
        held = [alias(leaf) for leaf in tensors(result)]
        for leaf in tensors(result):
            is_new = storage_of(leaf) not in given
            self.memory.watch(leaf, is_new)
            if is_new:
                self.made.append(alias(leaf))

        def again() -> None:
            for old, new in zip(held, tensors(func(*held_args, **held_kwargs)), strict=True):
                if storage_of(old) != storage_of(new):
                    old.copy_(new)

        self.steps.append(again)
        return result


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key that is equal for views of the same memory."""
    return tensor.untyped_storage()._cdata


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors that have a storage; a weight in oneDNN's own layout has none."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def alias(leaf: Any) -> Any:
    """Return a tensor on the same memory, independent of the original's lifetime."""
    is_suspended = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    return torch.ops.aten.alias.default(leaf) if is_suspended else leaf


def poison(tensor: torch.Tensor) -> None:
    """Overwrite the whole storage."""
    if tensor.is_floating_point():
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        whole.fill_(float("nan"))


def _picks_by_mask(func: Any, args: Any) -> bool:
    picks = func.overloadpacket.__name__ == "index"
    return picks and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tensors(args[1]))


class CpuGraphs:
    """Stand-in for torch.cuda's graphs; `replays` counts."""

    def __init__(self) -> None:
        self.replays = 0
        self.memory = CaptureMemory()
        self.ring_recording: OperationTape | None = None

    def make(self) -> CpuGraph:
        return CpuGraph(self)

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Treat a kernel as one operation, whatever it reads internally."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            ring_recording = self.ring_recording
            if ring_recording is None:
                return function(*args, **kwargs)
            ring_recording.__exit__(None, None, None)
            try:
                return ring_recording.run(function, args, kwargs)
            finally:
                ring_recording.__enter__()

        return launch


class CpuGraph:
    """One emulated graph."""

    def __init__(self, owner: CpuGraphs) -> None:
        self._owner = owner
        self._steps: list[Callable[[], None]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert self._owner.ring_recording is None, "captures do not overlap"
        self._owner.ring_recording = OperationTape(self._owner.memory)
        self._steps = self._owner.memory.steps = self._owner.ring_recording.steps
        self._owner.ring_recording.__enter__()

    def capture_end(self) -> None:
        ring_recording, self._owner.ring_recording = self._owner.ring_recording, None
        if ring_recording is None:
            raise RuntimeError("nothing is captured")
        ring_recording.__exit__(None, None, None)
        for made in ring_recording.made:
            poison(made)

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        assert self._owner.ring_recording is None
        self._owner.replays += 1
        for step in self._steps:
            step()


@contextmanager
def capturing(graph: CpuGraph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    """Capture like `torch.cuda.graph`."""
    graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        graph.capture_end()


class HeldBuffer(StepBuffer):
    """Step buffer on the CPU with fixed addresses, as on a device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 0)
        self._bytes = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def reserve(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[Any, torch.Tensor]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start, self._end = self._end, self._end + -(-size // 64) * 64
        assert self._end <= BUFFER_BYTES
        array = self._bytes.numpy()[start : start + size].view(dtype).reshape(shape)
        return array, torch.from_numpy(array)


@pytest.fixture
def cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> CpuGraphs:
    """Emulated graphs: runners made during the test replay graphs of steps with prefills."""
    graphs = CpuGraphs()
    plain = dispatch.ops_for("cpu")
    ops = Ops(**{field.name: graphs.kernel(getattr(plain, field.name)) for field in fields(Ops)})
    monkeypatch.setattr(dispatch, "cpu_ops", lambda: ops)
    for name, stand_in in {
        "CUDAGraph": graphs.make,
        "Stream": lambda: None,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
        "graph": capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made = ModelRunner.__init__

    def make(runner: ModelRunner, loaded: Any, storage: Any, config: RunnerConfig, **options: Any) -> None:
        made(runner, loaded, storage, config, **options)
        runner._buffer = HeldBuffer()
        runner._piecewise_graphs = PiecewiseGraphs(
            runner._model,
            storage,
            runner._ops,
            runner._buffer,
            max_num_batched_tokens=config.max_num_batched_tokens,
            failures=CaptureFailures(runner.notes.append),
        )

    launched, warm = ModelRunner.launch, set[int]()

    def launch(runner: ModelRunner, *args: Any) -> Any:
        """The first time behind what a GPU's warm-up captures."""
        if runner._piecewise_graphs is not None and id(runner) not in warm:
            with torch.inference_mode():
                runner._piecewise_graphs.capture_all()
        warm.add(id(runner))
        return launched(runner, *args)

    monkeypatch.setattr(ModelRunner, "__init__", make)
    monkeypatch.setattr(ModelRunner, "launch", launch)
    return graphs
