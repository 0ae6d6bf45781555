"""What attention over the block pool is given, decode and prefill alike, in every implementation.

A tuple, since one is made for each layer of each step: a frozen dataclass of as many fields takes five times as long
to make.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.host_lengths import HostLengths, Lengths
from kvscope_kernels.kv_formats import Cache


class AttentionArgs(NamedTuple):
    """Queries of some requests, one layer's cache, where the requests' tokens lie in it, and what the layer asks for.

    float32, bfloat16 or float16, one dtype for query and caches; or caches of int8 or float8_e4m3fn, read as
    k_cache[...] * k_scale[...] and v alike (`kv_formats`). Rows aligned to 16 bytes are read in 16-byte pieces.
    """

    query: Tensor
    """(num_tokens, num_heads, head_dim), any strides with a contiguous last axis; decode has one token a request."""
    k_cache: Tensor
    """(num_blocks, block_size, num_kv_heads, head_dim), any strides with a contiguous last axis: a view of storage in
    HND (heads before slots) or NHD order; any block size."""
    v_cache: Tensor
    """(num_blocks, block_size, num_kv_heads, value_dim), alike."""
    block_tables: Tensor
    """(batch, max_blocks) int32; entries past a request's last block, or before its first query's window, may hold
    anything, as may slots past its length."""
    seq_lens: Tensor
    """(batch,) int32: tokens of each request, those of `query` included; at most max_blocks * block_size."""
    scale: float
    """Of the scores, above 0."""
    sliding_window: int | None = None
    """How many tokens a query sees, itself among them; None: all."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """(num_heads,) floating."""
    k_scale: Tensor | None = None
    """(num_blocks, block_size, num_kv_heads) float32, any strides, with caches of 8 bits."""
    v_scale: Tensor | None = None
    """Alike, with the same strides."""
    max_seq_len: int | None = None
    """A bound on `seq_lens` that the host knows; without it the width of `block_tables`."""
    out: Tensor | None = None
    """(num_tokens, num_heads, value_dim) of query's dtype, written and returned; made if None."""
    is_chunked: bool = False
    """The text is cut into windows, and a query sees none before its own: with w = `sliding_window`, the one at p sees
    from p // w * w on instead of p + 1 - w (Llama 4)."""

    @property
    def cache(self) -> Cache:
        """Keys, values and their scales."""
        return Cache(self.k_cache, self.v_cache, self.k_scale, self.v_scale)

    def made_out(self) -> Tensor:
        """`out`, or a new one."""
        if self.out is not None:
            return self.out
        return self.query.new_empty(*self.query.shape[:2], self.v_cache.shape[3])

    def first_seen(self, position: Lengths) -> Lengths:
        """The first position that a query at each `position` sees; `attend_tiles.first_seen` and numbers.h alike."""
        window = self.sliding_window
        if window is None:
            return np.zeros_like(position)
        return np.maximum(position // window * window if self.is_chunked else position + 1 - window, 0)


class QueryRuns(NamedTuple):
    """Which queries of a prefill are whose."""

    start: Tensor
    """(batch + 1,) int32, ascending from 0 to num_tokens: request b's are rows start[b] .. start[b + 1] - 1, the last
    ones of its tokens."""
    max_len: int
    """A bound on the queries of one request, known to the host."""
    lengths: HostLengths | None = None
    """What the host knows of them, by which `third_party_attention` plans; None where no request is behind them."""
    plans: DecodePlans | None = None
    """Of the step: layers given the same ones share how runs are cut, as in decode; made if None."""
    is_fixed: bool = False
    """A query's numbers are the same bits wherever its run was cut and whatever runs beside it, which costs time."""
