"""Prefill by another library where it fits, by ours where not: `Ops` with it in place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.dispatch import Ops, PrefillAttention
from kvscope_kernels.launch import compute_capability
from kvscope_kernels.libraries.library import AttentionShape, Library, Prefill

Options = tuple[bool, bool]
"""Whether a layer has a sliding window, and a softcap: a library compiles each kind apart."""
PLAIN: Final[Options] = (False, False)


class PreferredPrefill:
    """A `PrefillAttention`: the library's for layers of `options`, which were tried, and ours for all else.

    With `give_up` it is ours from the library's first error on, and `give_up` is told why, on one line.
    """

    def __init__(
        self,
        library: Library,
        ours: PrefillAttention,
        options: frozenset[Options],
        give_up: Callable[[str], object] | None = None,
    ) -> None:
        self.library, self._ours, self._options = library, ours, options
        self._give_up, self._has_failed = give_up, False
        self._takes: dict[tuple[object, ...], bool] = {}

    def __call__(self, args: AttentionArgs, runs: QueryRuns) -> Tensor:
        """See `paged_prefill_attention`. Without `runs.lengths` it is ours."""
        is_plain = args.sinks is None and args.k_scale is None and not args.is_chunked and args.query.is_contiguous()
        is_tried = (args.sliding_window is not None, args.softcap is not None) in self._options
        fits = is_plain and is_tried and not self._has_failed
        if runs.lengths is None or not (fits and self._fits(*args[:3])):
            return self._ours(args, runs)
        try:
            return self.library.prefill(Prefill(args, runs, runs.lengths))
        except Exception as error:  # another's library, its plan, its compiler; what ours cannot do either it raises
            if self._give_up is None:
                raise
            self._has_failed = True
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
            self._give_up(f"{self.library.name} failed; kvscope's own kernels run prompts from here on: {why}")
            return self._ours(args, runs)

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
