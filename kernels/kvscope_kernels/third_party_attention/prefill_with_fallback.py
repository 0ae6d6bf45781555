"""Operations (`Ops`) whose prefill attention uses a third-party library for the layers it supports, and
kvscope's kernels for all others.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.dispatch import Ops, PrefillAttention
from kvscope_kernels.launch import compute_capability
from kvscope_kernels.third_party_attention.library import AttentionShape, Library, Prefill

Options = tuple[bool, bool]
"""Whether a layer has a sliding window, and whether it has a softcap.

Libraries compile a kernel for each combination.
"""
PLAIN: Final[Options] = (False, False)

RETRY_DELAY_S: Final = 20.0
MAX_ERRORS: Final = 3


class PrefillWithFallback:
    """`PrefillAttention` that uses the library for layers with the enabled `options`, and `ours` for all other layers.

    With `report_failure`, calls that fail in the library are repeated with `ours`. The library is tried again after
    `RETRY_DELAY_S`, and no longer used after `MAX_ERRORS` consecutive errors. `report_failure` is called with a line of
    text about the first and the last of these errors.
    """

    def __init__(
        self,
        library: Library,
        ours: PrefillAttention,
        options: frozenset[Options],
        report_failure: Callable[[str], object] | None = None,
    ) -> None:
        self.library, self._ours, self._options = library, ours, options
        self._report_failure, self._num_errors, self._retry_at_s = report_failure, 0, 0.0
        self._supported: dict[tuple[object, ...], bool] = {}

    @property
    def implementation(self) -> str:
        """Name and version of the library."""
        return self.library.name

    def __call__(self, args: AttentionArgs, runs: QueryRuns) -> Tensor:
        """Run prefill attention (`paged_prefill_attention`). Without `runs.lengths`, `ours` is used."""
        is_plain = args.sinks is None and args.k_scale is None and not args.is_chunked and args.query.is_contiguous()
        is_enabled = (args.sliding_window is not None, args.softcap is not None) in self._options
        is_candidate = is_plain and is_enabled and time.monotonic() >= self._retry_at_s
        if runs.lengths is None or not (is_candidate and self._is_supported(*args[:3])):
            return self._ours(args, runs)
        try:
            attended = self.library.prefill(Prefill(args, runs, runs.lengths))
        except Exception as error:  # any error of the library; invalid arguments raise in ours too
            if self._report_failure is None:
                raise
            self._record_failure(error, self._report_failure)
            return self._ours(args, runs)
        self._num_errors = 0
        return attended

    def _record_failure(self, error: Exception, report: Callable[[str], object]) -> None:
        self._num_errors += 1
        is_last = self._num_errors >= MAX_ERRORS
        self._retry_at_s = math.inf if is_last else time.monotonic() + RETRY_DELAY_S
        if is_last or self._num_errors == 1:
            until = "from here on" if is_last else f"and it is tried again in {RETRY_DELAY_S:.0f} s"
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
            report(f"{self.library.name} failed; kvscope's own kernels run prompts {until}: {why}")

    def _is_supported(self, query: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        key = (*query.shape[1:], *k_cache.shape[1:], *v_cache.shape[1:], query.dtype, k_cache.dtype)
        if key not in self._supported:
            self._supported[key] = k_cache.dtype == query.dtype and k_cache.shape == v_cache.shape
            self._supported[key] &= not self.library.refusal(shape_of(query, k_cache))
        return self._supported[key]


def shape_of(query: Tensor, k_cache: Tensor) -> AttentionShape:
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    capability = compute_capability(query.device)
    return AttentionShape(query.shape[1], num_kv_heads, head_dim, block_size, query.dtype, capability)


def with_library_prefill(
    ops: Ops,
    library: Library,
    options: frozenset[Options] = frozenset((PLAIN,)),
    report_failure: Callable[[str], object] | None = None,
) -> Ops:
    """Return `ops` with the library's prefill where it is supported; see `PrefillWithFallback`."""
    return replace(ops, prefill=PrefillWithFallback(library, ops.prefill, options, report_failure))
