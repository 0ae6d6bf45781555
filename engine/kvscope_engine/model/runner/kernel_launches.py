"""Counts the kernels that a forward pass launches, once per kind of pass.

Each torch operation counts as one launch (a few launch two kernels, so the count is a lower bound); Triton kernels are
counted as they are launched. Counting slows a pass down by some milliseconds, so the result is cached per kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_engine.model.input_batch.step_inputs import StepInputs

OPS_WITHOUT_KERNELS: Final = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach", "alias", "sym_size", "lift_fresh")
)
"""Names of torch operations that allocate or alias memory and launch no kernel."""
PassKind = tuple[int | bool, ...]
"""Cache key shared by passes that launch the same kernels; see `Launches.pass_kind`."""
GRAPH: Final[PassKind] = ()
"""Kind of a pass that replays a whole CUDA graph, which counts as one launch."""


class Launches:
    """Number of kernel launches of each kind of pass on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._counts: dict[PassKind, int] = {GRAPH: 1}

    def pass_kind(
        self, inputs: StepInputs, num_samples: int, *, in_graph: bool, num_pieces: int = 0, is_measured: bool = False
    ) -> PassKind | None:
        """Return the key of passes that launch the same kernels; None on a CPU.

        The number of decodes and the longest length determine whether attention is split and merged, which takes more
        kernels. The key contains only their number of binary digits, to limit the number of keys. `num_pieces`: number
        of CUDA graphs replayed between attention calls.
        """
        if not self._is_gpu:
            return None
        if in_graph:
            return GRAPH
        longest = int(inputs.seq_lens.max()) if len(inputs.seq_lens) else 0
        has_runs = inputs.num_tokens > inputs.num_single_token
        sizes = inputs.num_single_token.bit_length(), longest.bit_length()
        return (*sizes, has_runs, num_samples > 0, is_measured, num_pieces)

    def num_launches(self, kind: PassKind | None) -> int:
        """Return the number of launches of a pass of this kind; 0 if not counted yet or not on a GPU."""
        return self._counts.get(kind, 0) if kind is not None else 0

    @contextmanager
    def counted(self, kind: PassKind | None) -> Iterator[None]:
        """Return a context in which launches are counted if the kind is new. A pass that raises is not counted."""
        if kind is None or kind in self._counts:
            yield
            return
        operations = _Operations()
        with _kernels() as kernels, operations:
            yield
        num_pieces = kind[-1]
        self._counts[kind] = operations.count + kernels[0] + num_pieces


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        starts_none = func.is_view or func.overloadpacket.__name__ in OPS_WITHOUT_KERNELS
        self.count += isinstance(first, torch.Tensor) and first.device.type == "cuda" and not starts_none
        return result


@contextmanager
def _kernels() -> Iterator[list[int]]:
    """Return a context that counts the launches of Triton kernels by any thread of this process.

    Yields the count as a list with one element.
    """
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    count = [0]
    run = JITFunction.run

    def counting(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return run(kernel, *args, **kwargs)

    JITFunction.run = counting
    try:
        yield count
    finally:
        JITFunction.run = run
