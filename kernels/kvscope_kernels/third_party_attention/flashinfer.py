"""FlashInfer over our blocks, planned by the lengths that the host knows, once a step for all layers alike.

Source: arXiv 2501.01005, `BatchPrefillWithPagedKVCacheWrapper` of flashinfer/prefill.py; what a plan allocates:
`PrefillPlan` of include/flashinfer/attention/scheduler.cuh.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kvscope_kernels.launch import num_multiprocessors
from kvscope_kernels.third_party_attention.library import (
    SIXTEEN_BITS,
    AttentionShape,
    OncePerStep,
    Prefill,
    module,
    named,
)

MIN_WORKSPACE_BYTES: Final = 128 << 20
"""What its documentation recommends."""
_SLACK_BYTES: Final = 1 << 20
"""For what is aligned."""
_PROGRAMS_EACH: Final = 2
"""Of a plan that splits keys, a multiprocessor."""
_HEAD_DIMS: Final = (64, 128, 256)


class FlashInfer:
    """Raises Missing. What it needs of the device's memory is taken at the first prefill, and kept."""

    def __init__(self) -> None:
        self._library = module("flashinfer")
        self.name = named("FlashInfer", "flashinfer-python")
        self._workspace: Tensor | None = None
        self._wrappers: dict[object, _Wrapper] = {}
        self._pages: OncePerStep[Tensor] = OncePerStep()

    def refusal(self, shape: AttentionShape) -> str:
        """See `Library`."""
        if shape.capability < 80:
            return "needs compute capability 8"
        if shape.dtype not in SIXTEEN_BITS:
            return "computes in 16 bits"
        if shape.head_dim not in _HEAD_DIMS:
            return f"takes heads of {', '.join(map(str, _HEAD_DIMS))}, not of {shape.head_dim}"
        return ""

    def prefill(self, given: Prefill) -> Tensor:
        """See `Library`."""
        out = given.args.query.new_empty(given.args.query.shape) if given.args.out is None else given.args.out
        wrapper = self._wrapper(given)
        wrapper.plan(given, lambda: self._pages_of(given))
        wrapper.run(given.args.query, given.args.k_cache, given.args.v_cache, out)
        return out

    def _wrapper(self, given: Prefill) -> "_Wrapper":
        """One for layers that are alike, since a plan holds how they attend."""
        options = given.args.scale, given.args.sliding_window, given.args.softcap
        layout = _layout(given.args.k_cache)
        key = (*given.args.query.shape[1:], *given.args.k_cache.shape[1:], given.args.query.dtype, layout, *options)
        if key not in self._wrappers:
            needed = workspace_bytes(
                given.args.query.shape[1],
                given.args.k_cache.shape[2],
                given.args.query.shape[2],
                num_multiprocessors(given.args.query.device),
            )
            if self._workspace is None or self._workspace.numel() < needed:
                # Of use while a call runs, and calls run one after the other: wrappers share it.
                self._workspace = torch.zeros(needed, dtype=torch.uint8, device=given.args.query.device)
            made = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, layout)
            self._wrappers[key] = _Wrapper(made, given.args.query.device)
        return self._wrappers[key]

    def _pages_of(self, given: Prefill) -> Tensor:
        block_size = given.args.k_cache.shape[1]
        return self._pages.get(given.runs.start, block_size, lambda: _pages(given, block_size))


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, num_multiprocessors: int) -> int:
    """What a plan takes at most that splits keys among programs: per head, run and query of a tile a partial result
    and the logarithm of its sum, in float32. Without it a short turn behind a long context ends in a RuntimeError."""
    runs = -(-_PROGRAMS_EACH * num_multiprocessors // num_kv_heads)
    tile = 64 if head_dim >= 256 else 128
    return max(MIN_WORKSPACE_BYTES, num_heads * runs * tile * (head_dim + 1) * 4 + _SLACK_BYTES)


class _Wrapper:
    """FlashInfer's, and the step that it is planned for."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._step: Tensor | None = None
        self._sent: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def plan(self, given: Prefill, pages: Any) -> None:
        if given.runs.start is self._step:
            return
        if self._sent is not None:
            self._sent.synchronize()  # its host buffer is written anew, which the last plan's copy must have read
        (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = given.args.query.shape, given.args.k_cache.shape
        counts = _num_blocks(given, block_size)
        self._wrapper.plan(
            torch.from_numpy(given.lengths.query_start.astype(np.int32)),
            torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32)),
            pages(),
            torch.from_numpy(((given.lengths.seq_lens - 1) % block_size + 1).astype(np.int32)),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=given.args.scale,
            window_left=given.window_left,
            logits_soft_cap=given.args.softcap or 0.0,
            q_data_type=given.args.query.dtype,
            kv_data_type=given.args.k_cache.dtype,
        )
        if self._sent is not None:
            self._sent.record()
        self._step = given.runs.start

    def run(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        caches = (k_cache, v_cache)
        if _layout(k_cache) == "HND":
            caches = (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        self._wrapper.run(query, caches, out=out)


def _layout(cache: Tensor) -> str:
    """FlashInfer's name for the order in which a block's slots and heads lie."""
    return "HND" if cache.stride(2) > cache.stride(1) else "NHD"


def _num_blocks(given: Prefill, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return -(-given.lengths.seq_lens.astype(np.int64) // block_size)


def _pages(given: Prefill, block_size: int) -> Tensor:
    """The requests' blocks in a row, put together on the device; nothing is waited for."""
    total = int(_num_blocks(given, block_size).sum())
    counts = (given.args.seq_lens + (block_size - 1)) // block_size
    rows = torch.repeat_interleave(counts.to(torch.int64), output_size=total)
    first = counts.cumsum(0) - counts
    columns = torch.arange(total, device=counts.device) - first.index_select(0, rows)
    return given.args.block_tables[rows, columns]
