"""FlashInfer attention over our blocks, planned from host lengths once per step for all layers with the same options.

Source: arXiv 2501.01005, `BatchPrefillWithPagedKVCacheWrapper` of flashinfer/prefill.py; for the memory of a plan,
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
    import_library,
    name_with_version,
)

MIN_WORKSPACE_BYTES: Final = 128 << 20
"""Minimum workspace, as recommended by FlashInfer's documentation."""
_SLACK_BYTES: Final = 1 << 20
"""Additional bytes of the workspace for alignment."""
_PROGRAMS_PER_MULTIPROCESSOR: Final = 2
"""Number of programs per multiprocessor for which FlashInfer plans if it splits keys."""
_HEAD_DIMS: Final = (64, 128, 256)


class FlashInfer:
    """FlashInfer as a `Library`. Raises LibraryMissing if it cannot be imported.

    Device memory is allocated at the first prefill and not freed.
    """

    def __init__(self) -> None:
        self._library = import_library("flashinfer")
        self.name = name_with_version("FlashInfer", "flashinfer-python")
        self._workspace: Tensor | None = None
        self._wrappers: dict[object, _Wrapper] = {}
        self._pages: OncePerStep[Tensor] = OncePerStep()

    def refusal(self, shape: AttentionShape) -> str:
        if shape.capability < 80:
            return "needs compute capability 8"
        if shape.dtype not in SIXTEEN_BITS:
            return "computes in 16 bits"
        if shape.head_dim not in _HEAD_DIMS:
            return f"takes heads of {', '.join(map(str, _HEAD_DIMS))}, not of {shape.head_dim}"
        return ""

    def prefill(self, batch: Prefill) -> Tensor:
        out = batch.args.query.new_empty(batch.args.query.shape) if batch.args.out is None else batch.args.out
        wrapper = self._wrapper(batch)
        wrapper.plan(batch, lambda: self._pages_of(batch))
        wrapper.run(batch.args.query, batch.args.k_cache, batch.args.v_cache, out)
        return out

    def _wrapper(self, batch: Prefill) -> "_Wrapper":
        """Return the wrapper shared by all layers with the same shapes and options, on which a plan depends."""
        options = batch.args.scale, batch.args.sliding_window, batch.args.softcap
        layout = _layout(batch.args.k_cache)
        key = (*batch.args.query.shape[1:], *batch.args.k_cache.shape[1:], batch.args.query.dtype, layout, *options)
        if key not in self._wrappers:
            needed = workspace_bytes(
                batch.args.query.shape[1],
                batch.args.k_cache.shape[2],
                batch.args.query.shape[2],
                num_multiprocessors(batch.args.query.device),
            )
            if self._workspace is None or self._workspace.numel() < needed:
                # Wrappers share the workspace: it is used only during a call, and calls are sequential.
                self._workspace = torch.zeros(needed, dtype=torch.uint8, device=batch.args.query.device)
            library_wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, layout)
            self._wrappers[key] = _Wrapper(library_wrapper, batch.args.query.device)
        return self._wrappers[key]

    def _pages_of(self, batch: Prefill) -> Tensor:
        block_size = batch.args.k_cache.shape[1]
        return self._pages.get(batch.runs.start, block_size, lambda: _pages(batch, block_size))


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, num_multiprocessors: int) -> int:
    """Return the maximum workspace of a plan that splits keys over several programs.

    The workspace contains a float32 partial result and log-sum for each head of each query in the tiles of all
    programs. With a smaller workspace, a short prompt after a long context fails with a RuntimeError.
    """
    runs = -(-_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_kv_heads)
    tile = 64 if head_dim >= 256 else 128
    return max(MIN_WORKSPACE_BYTES, num_heads * runs * tile * (head_dim + 1) * 4 + _SLACK_BYTES)


class _Wrapper:
    """A FlashInfer wrapper object, and the step for which it was planned."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._step: Tensor | None = None
        self._plan_copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def plan(self, batch: Prefill, pages: Any) -> None:
        if batch.runs.start is self._step:
            return
        if self._plan_copied is not None:
            self._plan_copied.synchronize()  # wait for the last plan's copy from the host buffer, which is overwritten
        (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = batch.args.query.shape, batch.args.k_cache.shape
        counts = _num_blocks(batch, block_size)
        self._wrapper.plan(
            torch.from_numpy(batch.lengths.query_start.astype(np.int32)),
            torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32)),
            pages(),
            torch.from_numpy(((batch.lengths.seq_lens - 1) % block_size + 1).astype(np.int32)),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=batch.args.scale,
            window_left=batch.window_left,
            logits_soft_cap=batch.args.softcap or 0.0,
            q_data_type=batch.args.query.dtype,
            kv_data_type=batch.args.k_cache.dtype,
        )
        if self._plan_copied is not None:
            self._plan_copied.record()
        self._step = batch.runs.start

    def run(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        caches = (k_cache, v_cache)
        if _layout(k_cache) == "HND":
            caches = (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        self._wrapper.run(query, caches, out=out)


def _layout(cache: Tensor) -> str:
    """Return FlashInfer's name for the order of slots and heads within a block."""
    return "HND" if cache.stride(2) > cache.stride(1) else "NHD"


def _num_blocks(batch: Prefill, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return -(-batch.lengths.seq_lens.astype(np.int64) // block_size)


def _pages(batch: Prefill, block_size: int) -> Tensor:
    """Return the requests' blocks concatenated, computed on the device without synchronization."""
    total = int(_num_blocks(batch, block_size).sum())
    counts = (batch.args.seq_lens + (block_size - 1)) // block_size
    rows = torch.repeat_interleave(counts.to(torch.int64), output_size=total)
    first = counts.cumsum(0) - counts
    columns = torch.arange(total, device=counts.device) - first.index_select(0, rows)
    return batch.args.block_tables[rows, columns]
