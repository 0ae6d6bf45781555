"""Bytes that steps take on a device beside weights, KV and the model's own activations. Plain arithmetic.

Owns the sizes of what the runner allocates once, and what sampling makes of a step's logits, so that a plan of the
memory can ask before there is a runner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvscope_engine.model.cuda_graphs.decode_graphs import captured_sizes, most_rows
from kvscope_engine.model.cuda_graphs.piecewise.mixed_graphs import mixed_sizes
from kvscope_engine.model.device_memory.memory_plan import StepReserves
from kvscope_engine.model.input_batch.step_tensors import inputs_bytes, table_width
from kvscope_engine.model.layers.attention.mla.latent_runs import MOST_TOGETHER, expanded_bytes
from kvscope_engine.model.layers.attention.mla.latents import Latents
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_kernels.attention_scores.block_scores import MAX_PARTIAL_BYTES
from kvscope_kernels.decode.bounds import MAX_CUT_QUERIES, most_cut_runs, num_places, part_bounds, partial_bytes
from kvscope_kernels.launch import decode_tiles, latent_tiles, prefill_tiles
from kvscope_telemetry.engine_config import EngineConfig

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

CPU_BATCHED_TOKENS: Final = 512
GPU_BATCHED_TOKENS: Final = 8192
GRAPH_BYTES: Final = 256 << 20
"""Of all graphs together, beside the tensors that they read and write: their nodes, and what they keep between them."""
DRAFTED_GRAPH_BYTES: Final = 192 << 20
"""The same, of those of steps with drafts, of which there are three quarters as many."""
PIECES_BYTES: Final = 256 << 20
"""The same, of all graphs of steps with prefills, of which each layer has one a size."""
SAMPLING_INPUT_BYTES: Final = 1 << 20
"""Of a step's buffer, for what sampling needs of the requests. More than that goes up in copies of its own."""
SAMPLING_ROW_BYTES: Final = 256
STATE_ROW_BYTES: Final = 64
"""Of a step's buffer, for where a request's state is, is copied from, and is kept."""
MAX_MASK_BYTES: Final = 8 << 20
"""Of a step's buffer, for the tokens that each request of a form may have, a bit each."""
FLOAT32_BYTES: Final = 4
SMALLEST_TILE_TOKENS: Final = 16
"""Of attention's tiles, whatever is measured for a card."""
CHOICE_BYTES_A_BLOCK: Final = 24
"""What choosing blocks holds at once for one block, request and KV head: scores, and what ranking makes of them."""
CHOICE_BYTES_A_CHOSEN: Final = 96
"""The same for each that is chosen: its score and place, ranked and in order, and the compact tables."""
SAMPLING_BYTES_A_LOGIT: Final = 16
"""What sampling with every option holds at once for one logit: raw logits of those whose log-probabilities are asked
for, these, what is looked through for the largest of them, and a row filled up to whole pieces (4 each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step that service can ask for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_request_tokens: int
    """What the pool can hold of one request, at most the model's length."""
    block_size: int
    num_groups: int = 1
    """KV groups, each with block tables of its own."""
    max_drafts: int = 0
    """Tokens guessed ahead for one request; a step's drafts make it sample no more rows than these and one, or
    `max_num_seqs`."""
    has_experts: bool = False
    """Whether kernels are launched whose tiles grow with a step's tokens."""

    @property
    def max_request_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_request_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Attention heads of a model's widest layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    is_quantized: bool = False
    """Whether the cache has 8 bits."""
    latents: Latents | None = None
    """Where the cache holds these; `num_kv_heads` and `head_dim` are those of what is stored."""
    windows: tuple[int, ...] = (0,)
    """Tokens that layers see at most, each length once; 0: all. What layers of one share, those of another have too."""

    def visible(self, length: int, num_queries: int = 1) -> set[int]:
        """Tokens that the queries of a request of `length` see between them, in one layer or another. Where there are
        latents all are read."""
        if self.latents is not None:
            return {length}
        return {min(length, window + num_queries - 1) if window else length for window in self.windows}

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query, as the model gives it."""
        return self.head_dim if self.latents is None else self.latents.key_dim


class Processors(NamedTuple):
    """Of a GPU: how far attention is split hangs on them."""

    num_multiprocessors: int
    capability: int
    """90 for 9.0."""


def max_batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Tokens of the largest step: what was asked for, or what suits the device."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(GPU_BATCHED_TOKENS if device_type == "cuda" else CPU_BATCHED_TOKENS, config.max_num_seqs)


def step_reserves(
    config: EngineConfig, loaded: LoadedModel, processors: Processors, num_groups: int = 1
) -> StepReserves:
    """What stays taken for steps, beside what a profile of one shows, before it is known what the pool holds."""
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
    """Of the layer with most query heads, shared out among ranks; of one number where no layer attends."""
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
    """Bytes that one layer's attention over latents takes beside its partial results: a request that is expanded, or
    queries that meet latents as they are, whose room the next layer takes over."""
    latents = heads.latents
    if latents is None:
        return 0
    together = max(limits.max_num_seqs, MOST_TOGETHER)
    moved = together * heads.num_heads * (latents.stored_dim + 2 * latents.latent_dim)
    return max(moved * heads.element_bytes, expanded_bytes(latents, limits.max_request_tokens, heads.element_bytes))


def step_buffer_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Bytes of a step's buffer, on the host and again on the device."""
    masks = min(4 * -(-vocab_size // 32) * limits.max_num_seqs, MAX_MASK_BYTES)
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    length, num_groups = limits.max_request_tokens, limits.num_groups
    inputs = inputs_bytes(tokens, limits.max_num_seqs, length, limits.block_size, num_groups)
    rows = (SAMPLING_ROW_BYTES + STATE_ROW_BYTES) * limits.max_num_seqs
    return inputs + SAMPLING_INPUT_BYTES + rows + masks


def graph_tensor_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Bytes of the one tensor of logits that all graphs write, and of the block tables that all of them read."""
    columns = limits.num_groups * table_width(limits.max_request_tokens, limits.block_size)
    logits = most_rows(limits.max_num_seqs, limits.max_drafts) * vocab_size
    return FLOAT32_BYTES * (captured_sizes(limits.max_num_seqs)[-1] * columns + logits)


def piecewise_bytes(limits: StepLimits, heads: HeadShape) -> int:
    """Bytes of graphs of steps with prefills, and of what they and attention between them hand to each other: queries,
    what they attended to, and what the head is given, which is about as wide."""
    return (
        PIECES_BYTES
        + 3 * FLOAT32_BYTES * mixed_sizes(limits.max_num_batched_tokens)[-1] * heads.num_heads * heads.query_dim
    )


def split_partials_bytes(limits: StepLimits, heads: HeadShape, processors: Processors) -> int:
    """Bytes of partial results, which all layers of a window overwrite: of the largest decode, and of the short runs of
    queries beside it that take most."""
    sizes = range(1, limits.max_num_seqs + 1)  # many short ones are not cut, fewer are
    queries = range(1, MAX_CUT_QUERIES + 1)
    decodes = max(_decode_partials(size, limits.max_request_tokens, heads, processors) for size in sizes)
    return decodes + max(_run_partials(count, limits, heads, processors) for count in queries)


def shares_bytes(config: EngineConfig, limits: StepLimits, heads: HeadShape, processors: Processors) -> int:
    """Bytes that measuring attention by blocks takes of a step, beside what one without it takes.

    What a layer's parts leave of each block, or of each piece of one that is longer than a tile, which the next layer
    of the same window takes over: in the memory of graphs, and in that of steps without. And tables of requests by
    blocks: where a graph's layers add up, where those of a step without do, all groups put together, and two steps on
    their way down.
    """
    if not config.page_heat:
        return 0
    width = table_width(limits.max_request_tokens, limits.block_size)
    num_seqs, longest = limits.max_num_seqs, limits.max_request_tokens
    pieces_each = limits.block_size // math.gcd(limits.block_size, SMALLEST_TILE_TOKENS)
    places = sum(
        num_places(num_seqs, visible, limits.block_size, heads.num_heads, pieces_each)
        for visible in heads.visible(longest)
    )
    value_dim = heads.head_dim if heads.latents is None else heads.latents.latent_dim
    of_parts = max(_decode_partials(size, longest, heads, processors) for size in range(1, num_seqs + 1)) // value_dim
    sums = FLOAT32_BYTES * (places * pieces_each + len(heads.windows) * num_seqs) * heads.num_heads + of_parts
    num_tables = 5 if limits.num_groups > 1 else 4  # one group has nothing to put together
    tables = FLOAT32_BYTES * num_tables * limits.num_groups * num_seqs * width
    return sums * (1 if config.enforce_eager else 2) + tables


def choice_bytes(config: EngineConfig, limits: StepLimits, num_kv_heads: int) -> int:
    """Bytes that choosing blocks takes of a step: of one layer, whose room the next one takes over."""
    if config.sparse_decode is None:
        return 0
    chosen = math.ceil(config.sparse_decode * CHOICE_BYTES_A_CHOSEN)
    ranked = 3 * MAX_PARTIAL_BYTES  # estimates of some requests, their softmax and its logarithm
    return ranked + (CHOICE_BYTES_A_BLOCK + chosen) * limits.max_num_seqs * num_kv_heads * limits.max_request_blocks


def sampling_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Bytes that sampling with every option takes of a full batch's logits, these included."""
    rows = min(max(limits.max_num_seqs, 1 + limits.max_drafts), limits.max_num_batched_tokens)
    return (SAMPLING_BYTES_A_LOGIT + FLOAT32_BYTES) * rows * vocab_size


def logits_width(loaded: LoadedModel) -> int:
    """Columns of a model's logits: those of its head, which may be padded past the vocabulary."""
    module: Any = loaded.module
    head = module.get_output_embeddings()
    return int(getattr(head, "out_features", loaded.info.vocab_size))


def _decode_partials(size: int, length: int, heads: HeadShape, processors: Processors) -> int:
    """Of all windows."""
    num_multiprocessors = processors.num_multiprocessors
    if heads.latents is not None:
        return _latent_partials(size, heads.num_heads, length, heads, processors)
    dims = heads.head_dim, heads.head_dim, heads.num_heads // heads.num_kv_heads, heads.element_bytes
    tiles = decode_tiles(*dims, is_quantized=heads.is_quantized)
    cut = heads.num_kv_heads, tiles.tile_n, num_multiprocessors, tiles.num_warps
    rooms = (part_bounds(size, visible, *cut) for visible in heads.visible(length))
    return sum(partial_bytes(bounds, heads.num_heads, heads.head_dim) for bounds in rooms)


def _run_partials(max_queries: int, limits: StepLimits, heads: HeadShape, processors: Processors) -> int:
    """Of as many runs of up to `max_queries` queries as are cut, in all windows; fewer take less."""
    group, length = heads.num_heads // heads.num_kv_heads, limits.max_request_tokens
    if heads.latents is not None:
        num_rows = max_queries * heads.num_heads
        rows = latent_tiles(num_rows, heads.element_bytes, processors.capability, is_quantized=heads.is_quantized)
        cut = (processors.num_multiprocessors, rows.num_warps)
        size = min(most_cut_runs(max_queries, length, -(-num_rows // rows.tile_m), *cut), limits.max_num_seqs)
        return _latent_partials(size, num_rows, length, heads, processors)
    dims = heads.head_dim, heads.head_dim, group, heads.element_bytes
    tiles = prefill_tiles(*dims, max_queries, processors.capability, is_quantized=heads.is_quantized)
    programs_each = heads.num_kv_heads * -(-max_queries // (tiles.tile_m // group))
    num_bytes = 0
    for visible in heads.visible(length, max_queries):
        most = most_cut_runs(max_queries, visible, programs_each, processors.num_multiprocessors, tiles.num_warps)
        shape = programs_each, tiles.tile_n, processors.num_multiprocessors, tiles.num_warps
        bounds = part_bounds(min(most, limits.max_num_seqs), visible, *shape)
        num_bytes += partial_bytes(bounds, max_queries * heads.num_heads, heads.head_dim)
    return num_bytes


def _latent_partials(size: int, num_rows: int, length: int, heads: HeadShape, processors: Processors) -> int:
    """Of `size` requests of `num_rows` rows each, which are queries by heads."""
    assert heads.latents is not None, "only asked where there are latents"
    tiles = latent_tiles(num_rows, heads.element_bytes, processors.capability, is_quantized=heads.is_quantized)
    programs_each = -(-num_rows // tiles.tile_m)
    bounds = part_bounds(size, length, programs_each, tiles.tile_n, processors.num_multiprocessors, tiles.num_warps)
    return partial_bytes(bounds, num_rows, heads.latents.latent_dim)
