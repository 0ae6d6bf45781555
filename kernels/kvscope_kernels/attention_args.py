"""Arguments of attention over the block pool, for decode and prefill in every implementation.

They are NamedTuples, because one is created for each layer of each step: a frozen dataclass with as many fields takes
five times as long to create.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.host_lengths import HostLengths, Lengths
from kvscope_kernels.kv_formats import Cache


class AttentionArgs(NamedTuple):
    """Queries of a batch, one layer's cache with block tables, and the layer's attention options.

    Query and caches have the same dtype (float32, bfloat16 or float16). Alternatively, caches are int8 or float8_e4m3fn
    and are dequantized as `k_cache * k_scale` and `v_cache * v_scale` (`kv_formats`). Rows that are aligned to 16 bytes
    are read in 16-byte pieces.
    """

    query: Tensor
    """(num_tokens, num_heads, head_dim), any strides with a contiguous last axis. In decode, there is one token
    per request.
    """
    k_cache: Tensor
    """(num_blocks, block_size, num_kv_heads, head_dim), any block size, any strides with a contiguous last axis.

    The memory may be in HND (heads before slots) or NHD order.
    """
    v_cache: Tensor
    """(num_blocks, block_size, num_kv_heads, value_dim), strides as for `k_cache`."""
    block_tables: Tensor
    """(batch, max_blocks) int32.

    Entries after a request's last block or before the window of its first query are ignored, as are token slots after
    the end of the request.
    """
    seq_lens: Tensor
    """(batch,) int32: number of tokens of each request, including those in `query`; at most max_blocks * block_size."""
    scale: float
    """Factor by which attention scores are multiplied, above 0."""
    sliding_window: int | None = None
    """Number of tokens that a query attends to, including its own; None if it attends to all earlier tokens."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """(num_heads,) logits added to the denominator of the softmax, floating-point; None for a model without sinks."""
    k_scale: Tensor | None = None
    """(num_blocks, block_size, num_kv_heads) float32, any strides; for 8-bit caches."""
    v_scale: Tensor | None = None
    """Scales of `v_cache`, with the shape, dtype and strides of `k_scale`."""
    max_seq_len: int | None = None
    """Upper bound of `seq_lens`, known on the host; None if it is the capacity of `block_tables`."""
    out: Tensor | None = None
    """(num_tokens, num_heads, value_dim) of query's dtype, written and returned; allocated if None."""
    is_chunked: bool = False
    """Whether sequences are divided into chunks of w = `sliding_window` tokens, and a query attends only to its own
    chunk (Llama 4).

    A query at position p then attends to tokens from p // w * w on instead of p + 1 - w.
    """

    @property
    def cache(self) -> Cache:
        return Cache(self.k_cache, self.v_cache, self.k_scale, self.v_scale)

    def out_or_new(self) -> Tensor:
        if self.out is not None:
            return self.out
        return self.query.new_empty(*self.query.shape[:2], self.v_cache.shape[3])

    def first_seen(self, position: Lengths) -> Lengths:
        """Return the first position that a query at each `position` attends to.

        Same as `attend_tiles.first_seen`, and as first_seen in numbers.h.
        """
        window = self.sliding_window
        if window is None:
            return np.zeros_like(position)
        return np.maximum(position // window * window if self.is_chunked else position + 1 - window, 0)


class QueryRuns(NamedTuple):
    """Consecutive new tokens (queries) of each request in a prefill."""

    start: Tensor
    """(batch + 1,) int32, ascending from 0 to num_tokens. Request b has query rows start[b] .. start[b + 1] -
    1, which are the last of its tokens.
    """
    max_len: int
    """Upper bound of the number of queries per request, known on the host."""
    lengths: HostLengths | None = None
    """Lengths of the requests on the host, which `third_party_attention` needs for planning. None in steps
    without real requests, such as those of the warm-up, and where no library is used.
    """
    plans: DecodePlans | None = None
    """Plans of the step. If layers get the same object, they share the split of query runs, as in decode. If
    None, a new plan is created for the call.
    """
    is_fixed: bool = False
    """Whether results must be bitwise independent of how prompts are chunked and batched, which is slower."""
