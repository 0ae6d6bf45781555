"""Computes the bytes that steps need on a device in addition to weights, KV and the model's own activations.

Covers the buffers that the runner allocates once and the tensors of sampling, so that a memory plan can be made before
a runner exists. Plain arithmetic; allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvscope_engine.model.cuda_graphs.decode_graphs import captured_sizes, max_logits_rows
from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import piecewise_sizes
from kvscope_engine.model.device_memory.memory_plan import StepReserves
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import inputs_bytes, table_width
from kvscope_engine.model.layers.attention.mla.latent_runs import MAX_GROUPED_QUERIES, expanded_bytes
from kvscope_engine.model.layers.attention.mla.latents import Latents
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_kernels.attention_scores.block_scores import MAX_PARTIAL_BYTES
from kvscope_kernels.decode.bounds import MAX_CUT_QUERIES, block_sum_capacity, max_cut_runs, part_bounds, partial_bytes
from kvscope_kernels.launch import decode_tiles, latent_tiles, prefill_tiles
from kvscope_telemetry.engine_config import EngineConfig

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

CPU_BATCHED_TOKENS: Final = 512
GPU_BATCHED_TOKENS: Final = 8192
GRAPH_BYTES: Final = 256 << 20
"""Bytes reserved for the nodes and private memory pools of all decode graphs, without the tensors that they read and
write.
"""
DRAFTED_GRAPH_BYTES: Final = 192 << 20
"""Bytes reserved for the graphs of steps with drafts, which are three quarters as many as those of decodes."""
PIECEWISE_GRAPH_BYTES: Final = 256 << 20
"""Bytes reserved for all graphs of steps with prefills: one per layer and size."""
SAMPLING_INPUT_BYTES: Final = 1 << 20
"""Bytes reserved in a step's buffer for per-request sampling inputs. Larger inputs are uploaded in separate copies."""
SAMPLING_ROW_BYTES: Final = 256
STATE_ROW_BYTES: Final = 64
"""Bytes reserved per request in a step's buffer for its recurrent state's slot, and for slots of state copies
and saves.
"""
MAX_MASK_BYTES: Final = 8 << 20
"""Maximum bytes in a step's buffer for the token bitmasks of requests with a grammar, one bit per token."""
FLOAT32_BYTES: Final = 4
SMALLEST_TILE_TOKENS: Final = 16
"""Number of tokens in the smallest attention tile that is used on any GPU."""
CHOICE_BYTES_PER_BLOCK: Final = 24
"""Peak bytes that sparse attention needs per block, request and KV head: scores and the results of ranking them."""
CHOICE_BYTES_PER_CHOSEN_BLOCK: Final = 96
"""Peak bytes that sparse attention needs per chosen block: its score and index, ranked and in order, and
compact tables.
"""
SAMPLING_BYTES_PER_LOGIT: Final = 16
"""Peak bytes per logit when sampling with every option.

4 bytes each for the raw logits if log-probabilities are requested, the processed logits, the candidates for the largest
logits, and a row padded to whole chunks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Attention heads of the model's layer with the most query heads, and the layout of its KV cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    is_quantized: bool = False
    """Whether the KV cache has 8-bit elements."""
    latents: Latents | None = None
    """Layout of the latents, if the cache stores latents (MLA). `num_kv_heads` and `head_dim` are then those of the
    cache.
    """
    windows: tuple[int, ...] = (0,)
    """Distinct sliding windows of the layers in tokens; 0 for full attention. Layers with the same window share
    buffers.
    """

    def visible(self, length: int, num_queries: int = 1) -> set[int]:
        """Return, for each window, how many KV tokens the last `num_queries` tokens of a request of `length` tokens
        read in total.

        If the cache stores latents (MLA), this is `length`.
        """
        if self.latents is not None:
            return {length}
        return {min(length, window + num_queries - 1) if window else length for window in self.windows}

    @property
    def query_dim(self) -> int:
        """Elements of one head's query, as computed by the model."""
        return self.head_dim if self.latents is None else self.latents.key_dim


class Processors(NamedTuple):
    """Properties of a GPU that determine into how many splits attention is divided."""

    num_multiprocessors: int
    capability: int
    """Compute capability times 10: 90 for 9.0."""


def max_batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Return the maximum number of tokens per step: the configured number, or the default for the device."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(GPU_BATCHED_TOKENS if device_type == "cuda" else CPU_BATCHED_TOKENS, config.max_num_seqs)


def step_reserves(
    config: EngineConfig, loaded: LoadedModel, processors: Processors, num_groups: int = 1
) -> StepReserves:
    """Return the bytes reserved for steps in addition to a measured profile, before the size of the pool is known."""
    limits = StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_batched_tokens(config, loaded.device.type),
        max_request_tokens=loaded.max_model_len,
        block_size=config.block_size,
        num_groups=num_groups,
        max_drafts=config.max_drafts,
    )
    heads = _heads(config, loaded)
    graphs = 0 if config.enforce_eager else GRAPH_BYTES + graph_tensor_bytes(limits, logits_width(loaded))
    if config.max_drafts and not config.enforce_eager:
        graphs += DRAFTED_GRAPH_BYTES
    partials = split_partials_bytes(limits, heads, processors) + shares_bytes(config, limits, heads, processors)
    partials += latent_bytes(limits, heads)
    return StepReserves(
        attention_partials=partials + choice_bytes(config, limits, heads.num_kv_heads),
        graphs=graphs + step_buffer_bytes(limits, logits_width(loaded)),
        piecewise_graphs=piecewise_bytes(limits, heads) if config.wants_piecewise_graphs else 0,
        sampling=sampling_bytes(limits, logits_width(loaded)),
    )


def _heads(config: EngineConfig, loaded: LoadedModel) -> HeadShape:
    is_quantized, calls = config.kv_cache_dtype != "auto", check_hook(loaded.module)
    if any(call.options.latents is not None for call in calls):
        return head_shape(calls, loaded.dtype.itemsize, is_quantized=is_quantized)
    return HeadShape(
        num_heads=loaded.num_query_heads,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        element_bytes=loaded.dtype.itemsize,
        is_quantized=is_quantized,
        windows=_windows(calls),
    )


def head_shape(calls: Sequence[LayerCall], element_bytes: int, *, is_quantized: bool, num_ranks: int = 1) -> HeadShape:
    """Return the head shape of the layer with the most query heads, divided among `num_ranks` ranks.

    If the model has no attention layers, every size is 1.
    """
    widest = max(calls, key=lambda call: call.num_query_heads, default=None)
    if widest is None:
        return HeadShape(num_heads=1, num_kv_heads=1, head_dim=1, element_bytes=element_bytes)
    kv_heads = max(1, widest.shape.num_kv_heads // num_ranks)
    return HeadShape(
        num_heads=max(kv_heads, widest.num_query_heads // num_ranks),
        num_kv_heads=kv_heads,
        head_dim=widest.shape.head_dim,
        element_bytes=element_bytes,
        is_quantized=is_quantized,
        latents=widest.options.latents,
        windows=_windows(calls),
    )


def _windows(calls: Sequence[LayerCall]) -> tuple[int, ...]:
    return tuple({call.options.sliding_window or 0: None for call in calls}) or (0,)


def latent_bytes(limits: StepLimits, heads: HeadShape) -> int:
    """Return the bytes that one layer's attention over latents (MLA) needs in addition to its partial results.

    This is one request's expanded latents, or the queries projected into latent space, whichever is larger. The next
    layer reuses the memory.
    """
    latents = heads.latents
    if latents is None:
        return 0
    num_queries = max(limits.max_num_seqs, MAX_GROUPED_QUERIES)
    num_elements = num_queries * heads.num_heads * (latents.stored_dim + 2 * latents.latent_dim)
    return max(
        num_elements * heads.element_bytes, expanded_bytes(latents, limits.max_request_tokens, heads.element_bytes)
    )


def step_buffer_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Return the size of a step's input buffer in bytes, on the device. Each host buffer has the same size."""
    masks = min(4 * -(-vocab_size // 32) * limits.max_num_seqs, MAX_MASK_BYTES)
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    length, num_groups = limits.max_request_tokens, limits.num_groups
    inputs = inputs_bytes(tokens, limits.max_num_seqs, length, limits.block_size, num_groups)
    rows = (SAMPLING_ROW_BYTES + STATE_ROW_BYTES) * limits.max_num_seqs
    return inputs + SAMPLING_INPUT_BYTES + rows + masks


def graph_tensor_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Return the bytes of the logits tensor and of the block tables that all decode graphs share."""
    columns = limits.num_groups * table_width(limits.max_request_tokens, limits.block_size)
    logits = max_logits_rows(limits.max_num_seqs, limits.max_drafts) * vocab_size
    return FLOAT32_BYTES * (captured_sizes(limits.max_num_seqs)[-1] * columns + logits)


def piecewise_bytes(limits: StepLimits, heads: HeadShape) -> int:
    """Return the bytes of the graphs of steps with prefills, and of the tensors that they exchange with attention.

    The tensors are the queries, the attention output, and the input of the head, which is about as wide.
    """
    return (
        PIECEWISE_GRAPH_BYTES
        + 3 * FLOAT32_BYTES * piecewise_sizes(limits.max_num_batched_tokens)[-1] * heads.num_heads * heads.query_dim
    )


def split_partials_bytes(limits: StepLimits, heads: HeadShape, processors: Processors) -> int:
    """Return the bytes of the partial results of split attention. Layers with the same window share the memory.

    The result is the maximum for decodes plus the maximum for short runs of queries, because one step may contain both
    decodes and such runs.
    """
    sizes = range(1, limits.max_num_seqs + 1)  # fewer requests may need more: large batches are not split
    queries = range(1, MAX_CUT_QUERIES + 1)
    decodes = max(_decode_partials(size, limits.max_request_tokens, heads, processors) for size in sizes)
    return decodes + max(_run_partials(count, limits, heads, processors) for count in queries)


def shares_bytes(config: EngineConfig, limits: StepLimits, heads: HeadShape, processors: Processors) -> int:
    """Return the bytes that measuring attention per block adds to a step.

    Two kinds of buffers are counted. One holds sums per block (or per piece of a block longer than a tile), which the
    next layer with the same window overwrites; it exists for CUDA graphs and for eager steps. The other are tables of
    requests by blocks: the accumulators of graphs and of eager steps, their concatenation over all groups, and the
    tables of two steps that are being copied to the host.
    """
    if not config.page_heat:
        return 0
    width = table_width(limits.max_request_tokens, limits.block_size)
    num_seqs, longest = limits.max_num_seqs, limits.max_request_tokens
    pieces_each = limits.block_size // math.gcd(limits.block_size, SMALLEST_TILE_TOKENS)
    num_blocks = sum(
        block_sum_capacity(num_seqs, visible, limits.block_size, heads.num_heads, pieces_each)
        for visible in heads.visible(longest)
    )
    value_dim = heads.head_dim if heads.latents is None else heads.latents.latent_dim
    part_bytes = max(_decode_partials(size, longest, heads, processors) for size in range(1, num_seqs + 1)) // value_dim
    sums = FLOAT32_BYTES * (num_blocks * pieces_each + len(heads.windows) * num_seqs) * heads.num_heads + part_bytes
    num_tables = 5 if limits.num_groups > 1 else 4  # a single group needs no concatenation
    tables = FLOAT32_BYTES * num_tables * limits.num_groups * num_seqs * width
    return sums * (1 if config.enforce_eager else 2) + tables


def choice_bytes(config: EngineConfig, limits: StepLimits, num_kv_heads: int) -> int:
    """Return the bytes that choosing blocks (sparse attention) needs in one layer. The next layer reuses the memory."""
    if config.sparse_decode is None:
        return 0
    chosen = math.ceil(config.sparse_decode * CHOICE_BYTES_PER_CHOSEN_BLOCK)
    ranked = 3 * MAX_PARTIAL_BYTES  # estimates of some requests, their softmax and its log
    return ranked + (CHOICE_BYTES_PER_BLOCK + chosen) * limits.max_num_seqs * num_kv_heads * limits.max_request_blocks


def sampling_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Return the bytes that sampling a full batch with every option needs, including the logits."""
    rows = min(max(limits.max_num_seqs, 1 + limits.max_drafts), limits.max_num_batched_tokens)
    return (SAMPLING_BYTES_PER_LOGIT + FLOAT32_BYTES) * rows * vocab_size


def logits_width(loaded: LoadedModel) -> int:
    """Return the number of columns of the model's logits, which may be padded beyond the vocabulary."""
    module: Any = loaded.module
    head = module.get_output_embeddings()
    return int(getattr(head, "out_features", loaded.info.vocab_size))


def _decode_partials(size: int, length: int, heads: HeadShape, processors: Processors) -> int:
    num_multiprocessors = processors.num_multiprocessors
    if heads.latents is not None:
        return _latent_partials(size, heads.num_heads, length, heads, processors)
    dims = heads.head_dim, heads.head_dim, heads.num_heads // heads.num_kv_heads, heads.element_bytes
    tiles = decode_tiles(*dims, is_quantized=heads.is_quantized)
    split_args = heads.num_kv_heads, tiles.tile_n, num_multiprocessors, tiles.num_warps
    all_bounds = (part_bounds(size, visible, *split_args) for visible in heads.visible(length))
    return sum(partial_bytes(window_bounds, heads.num_heads, heads.head_dim) for window_bounds in all_bounds)


def _run_partials(max_queries: int, limits: StepLimits, heads: HeadShape, processors: Processors) -> int:
    """Return the bytes of the partial results of query runs of up to `max_queries` queries, summed over all windows.

    Computed for the largest number of runs that are split.
    """
    group, length = heads.num_heads // heads.num_kv_heads, limits.max_request_tokens
    if heads.latents is not None:
        num_rows = max_queries * heads.num_heads
        rows = latent_tiles(num_rows, heads.element_bytes, processors.capability, is_quantized=heads.is_quantized)
        split_args = (processors.num_multiprocessors, rows.num_warps)
        size = min(max_cut_runs(max_queries, length, -(-num_rows // rows.tile_m), *split_args), limits.max_num_seqs)
        return _latent_partials(size, num_rows, length, heads, processors)
    dims = heads.head_dim, heads.head_dim, group, heads.element_bytes
    tiles = prefill_tiles(*dims, max_queries, processors.capability, is_quantized=heads.is_quantized)
    programs_each = heads.num_kv_heads * -(-max_queries // (tiles.tile_m // group))
    num_bytes = 0
    for visible in heads.visible(length, max_queries):
        max_runs = max_cut_runs(max_queries, visible, programs_each, processors.num_multiprocessors, tiles.num_warps)
        shape = programs_each, tiles.tile_n, processors.num_multiprocessors, tiles.num_warps
        bounds = part_bounds(min(max_runs, limits.max_num_seqs), visible, *shape)
        num_bytes += partial_bytes(bounds, max_queries * heads.num_heads, heads.head_dim)
    return num_bytes


def _latent_partials(size: int, num_rows: int, length: int, heads: HeadShape, processors: Processors) -> int:
    """Return the bytes of the partial results of `size` requests with `num_rows` rows each (queries times heads)."""
    assert heads.latents is not None, "only asked where there are latents"
    tiles = latent_tiles(num_rows, heads.element_bytes, processors.capability, is_quantized=heads.is_quantized)
    programs_each = -(-num_rows // tiles.tile_m)
    bounds = part_bounds(size, length, programs_each, tiles.tile_n, processors.num_multiprocessors, tiles.num_warps)
    return partial_bytes(bounds, num_rows, heads.latents.latent_dim)
