"""Prefill by another library where it fits, by ours where not: `Ops` with it in place."""

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
"""Whether a layer has a sliding window, and a softcap: a library compiles each kind apart."""
PLAIN: Final[Options] = (False, False)

PAUSE_S: Final = 20.0
MAX_ERRORS: Final = 3


class PreferredPrefill:
    """A `PrefillAttention`: the library's for layers of `options`, which were tried, and ours for all else.

    With `give_up` the library's errors are ours to run: it is tried again after `PAUSE_S`, and given up at the last of
    `MAX_ERRORS` without a success in between; `give_up` is told why of the first and the last, on one line.
    """

    def __init__(
        self,
        library: Library,
        ours: PrefillAttention,
        options: frozenset[Options],
        give_up: Callable[[str], object] | None = None,
    ) -> None:
        self.library, self._ours, self._options = library, ours, options
        self._give_up, self._num_errors, self._not_before_s = give_up, 0, 0.0
        self._takes: dict[tuple[object, ...], bool] = {}

    @property
    def implementation(self) -> str:
        """Name and version of the library."""
        return self.library.name

    def __call__(self, args: AttentionArgs, runs: QueryRuns) -> Tensor:
        """See `paged_prefill_attention`. Without `runs.lengths` it is ours."""
        is_plain = args.sinks is None and args.k_scale is None and not args.is_chunked and args.query.is_contiguous()
        is_tried = (args.sliding_window is not None, args.softcap is not None) in self._options
        fits = is_plain and is_tried and time.monotonic() >= self._not_before_s
        if runs.lengths is None or not (fits and self._fits(*args[:3])):
            return self._ours(args, runs)
        try:
            attended = self.library.prefill(Prefill(args, runs, runs.lengths))
        except Exception as error:  # another's library, its plan, its compiler; what ours cannot do either it raises
            if self._give_up is None:
                raise
            self._failed(error, self._give_up)
            return self._ours(args, runs)
        self._num_errors = 0
        return attended

    def _failed(self, error: Exception, tell: Callable[[str], object]) -> None:
        self._num_errors += 1
        is_last = self._num_errors >= MAX_ERRORS
        self._not_before_s = math.inf if is_last else time.monotonic() + PAUSE_S
        if is_last or self._num_errors == 1:
            until = "from here on" if is_last else f"and it is tried again in {PAUSE_S:.0f} s"
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
            tell(f"{self.library.name} failed; kvscope's own kernels run prompts {until}: {why}")

    def _fits(self, query: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        key = (*query.shape[1:], *k_cache.shape[1:], *v_cache.shape[1:], query.dtype, k_cache.dtype)
        if key not in self._takes:
            self._takes[key] = k_cache.dtype == query.dtype and k_cache.shape == v_cache.shape
            self._takes[key] &= not self.library.refusal(shape_of(query, k_cache))
        return self._takes[key]


def shape_of(query: Tensor, k_cache: Tensor) -> AttentionShape:
    """Of a layer by its tensors."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    capability = compute_capability(query.device)
    return AttentionShape(query.shape[1], num_kv_heads, head_dim, block_size, query.dtype, capability)


def preferring(
    ops: Ops,
    library: Library,
    options: frozenset[Options] = frozenset((PLAIN,)),
    give_up: Callable[[str], object] | None = None,
) -> Ops:
    """The same, with the library's prefill; see `PreferredPrefill`."""
    return replace(ops, prefill=PreferredPrefill(library, ops.prefill, options, give_up))
