"""Kernels that a forward pass hands to the device: counted when the first of its kind runs, known after that.

torch's operations are counted as torch dispatches them, one each (a few start two kernels, so it is what there are at
least), Triton's kernels as they are launched. Counting slows a pass by some milliseconds, which is why it is done once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_engine.model.input_batch.step_inputs import StepInputs

START_NOTHING: Final = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach", "alias", "sym_size", "lift_fresh")
)
"""Operations that return other memory, or the same, and compute nothing."""
Kind = tuple[int | bool, ...]
GRAPH: Final[Kind] = ()
"""A pass that was captured: the host hands over one thing."""


class Launches:
    """The count of each kind of pass on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._known: dict[Kind, int] = {GRAPH: 1}

    def kind(
        self, inputs: StepInputs, num_samples: int, *, in_graph: bool, num_pieces: int = 0, is_measured: bool = False
    ) -> Kind | None:
        """What decides which kernels a pass launches; None on a CPU, which is handed none.

        Lengths and sizes by their number of digits: they choose whether decodes are split and merged. `num_pieces` is
        how many graphs it replays between attention.
        """
        if not self._is_gpu:
            return None
        if in_graph:
            return GRAPH
        longest = int(inputs.seq_lens.max()) if len(inputs.seq_lens) else 0
        has_runs = inputs.num_tokens > inputs.num_single_token
        sizes = inputs.num_single_token.bit_length(), longest.bit_length()
        return (*sizes, has_runs, num_samples > 0, is_measured, num_pieces)

    def of(self, kind: Kind | None) -> int:
        """What a pass of this kind launches; 0: not counted, or not on a GPU."""
        return self._known.get(kind, 0) if kind is not None else 0

    @contextmanager
    def counted(self, kind: Kind | None) -> Iterator[None]:
        """Around a pass: counts where the kind is new. What fails is not known."""
        if kind is None or kind in self._known:
            yield
            return
        operations = _Operations()
        with _kernels() as kernels, operations:
            yield
        num_pieces = kind[-1]
        self._known[kind] = operations.count + kernels[0] + num_pieces


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        starts_none = func.is_view or func.overloadpacket.__name__ in START_NOTHING
        self.count += isinstance(first, torch.Tensor) and first.device.type == "cuda" and not starts_none
        return result


@contextmanager
def _kernels() -> Iterator[list[int]]:
    """Counts launches of Triton's kernels, by anybody in this process."""
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
