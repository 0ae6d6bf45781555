"""Runs a step in tiles of a fixed number of tokens, so that a token's results do not depend on the rest of the batch.

oneDNN, cuBLAS and torch's own kernels choose their order of summation by the number of rows: the same row has different
last bits in a matmul of 64 rows and in one of a single row. If every matmul has the same number of rows, only a row's
position in its tile varies. `tile_check` proves at load that the bits are the same at every position and, on a CPU,
which other tile sizes also give the same bits.

Decodes run as prefills, because decode attention sums in another order. Prefill attention (prefill.c on a CPU,
`QueryRuns.is_fixed` on a GPU) gives a token the same bits wherever its query run was split.

A tile runs through all layers before the next one, so it reads KV that earlier tiles of the same requests have written.
Must not depend on policy or sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvscope_engine.model.input_batch.step_inputs import Int32, Int64, StepInputs
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerKV
from kvscope_engine.model.layers.attention.paged_attention import AttentionOptions, PagedContext, PrefillBatch
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.layers.fused.float32_head import Float32Head
from kvscope_kernels import Ops
from kvscope_kernels.host_lengths import HostLengths

TILE_TOKENS: Final = {torch.float32: 16, torch.bfloat16: 32}
"""Tokens per tile on a CPU, by the dtype of activations. Large tiles make a single decode slow, small ones prompts.

Measured on one core with a weight of (576, 3072). A single decode takes 1.2 times as long in a matmul with 32 rows of
bfloat16 as with one row, and 1.7 times as long in one with 16 rows of float32. Each token of a prompt takes 1.4 and 1.3
times as long, respectively, as in a matmul with 64 rows.
"""
ROUNDED_TILE_TOKENS: Final = 8
"""Tokens per tile with quantized weights, whose matmuls take time in proportion to the rows.

In tiles of 32, a single decode of the default model took 8 times as long; prompts took as long as without tiles.
"""
GPU_TILE_TOKENS: Final = 128
"""Tokens per tile on a GPU, for any dtype. By GPU specifications, reading 16-bit weights takes as long as multiplying
them by 75 (RTX 3090) to 300 (H100) rows; not measured."""
OTHER_TILE_SIZES: Final = (1, 4, 16, 64)
"""Additional tile sizes in tokens on a CPU, used if they are proven to give the same bits. Matmuls with quantized
weights and many float32 matmuls pass.
"""
_MAX_PADDED_RATIO: Final = 1.25
"""Maximum ratio of tile size to remaining tokens up to which a tile is padded; above it, smaller tiles are filled.

Each tile reads all weights, so padding rows are cheap in comparison if weights are not quantized.
"""


def tile_tokens(device_type: str, dtype: torch.dtype, quantization: str) -> int:
    """Return the tokens per tile; 0 if the attention of this dtype depends on the batch."""
    if device_type == "cuda":
        return GPU_TILE_TOKENS
    size = TILE_TOKENS.get(dtype, 0)
    return size if quantization == "none" else min(size, ROUNDED_TILE_TOKENS)


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive tokens of a step in a tile of `size` tokens. Padding tokens write to no slot, and their outputs are
    not read.
    """

    input_ids: Int64
    """Token ids, shape (size,)."""
    positions: Int64
    """Position of each token in its sequence, shape (size,)."""
    slot_mapping: Int64
    """Slot to which each token's KV is written, shape (G, size) for G KV groups; -1 for padding."""
    block_tables: Int32
    """Block ids of the S sequences with tokens in the tile, shape (G, S, max_blocks)."""
    seq_lens: Int32
    """Shape (S,): length of each sequence up to its last token in the tile."""
    query_start: Int32
    """Shape (S + 1,): first row of each sequence in the tile, and the number of rows."""
    sample_rows: Int64
    """Indices of the tile's rows whose logits are sampled."""


def split_into_tiles(inputs: StepInputs, sizes: Sequence[int], spare_rows: int = 0) -> Iterator[Tile]:
    """Yield the step's tokens in tiles of the given sizes (ascending). Up to `spare_rows` rows of padding are always
    accepted.
    """
    starts, end = inputs.query_start, 0
    while (start := end) < inputs.num_tokens:
        size = _next_size(inputs.num_tokens - start, sizes, spare_rows)
        end = min(start + size, inputs.num_tokens)
        first = int(np.searchsorted(starts, start, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        bounds = np.clip(starts[first : last + 1], start, end)
        num_later_tokens = starts[first + 1 : last + 1] - bounds[1:]
        is_in_tile = (inputs.sample_rows >= start) & (inputs.sample_rows < end)
        yield Tile(
            _padded(inputs.input_ids[start:end], size, 0),
            _padded(inputs.positions[start:end], size, 0),
            _padded(inputs.slot_mapping[:, start:end], size, -1),
            np.ascontiguousarray(inputs.block_tables[:, first:last]),
            (inputs.seq_lens[first:last] - num_later_tokens).astype(np.int32),
            (bounds - start).astype(np.int32),
            inputs.sample_rows[is_in_tile] - start,
        )


def _next_size(num_tokens: int, sizes: Sequence[int], spare_rows: int) -> int:
    """Return the smallest size that holds all tokens. If it would waste too many rows, return the largest size
    that the tokens fill.
    """
    enough = next((size for size in sizes if size >= num_tokens), None)
    filled = next((size for size in reversed(sizes) if size <= num_tokens), None)
    if enough is not None and (filled is None or enough <= _MAX_PADDED_RATIO * num_tokens + spare_rows):
        return enough
    assert filled is not None, "one of the sizes is enough, or is filled"
    return filled


class FixedTiles:
    """Runs a model in tiles of `size` tokens, on the blocks of `storage`.

    `other_sizes` are further tile sizes that give the same bits. The output head multiplies as many rows as the tile
    has; on a CPU, a `Float32Head` always multiplies `size` rows.
    """

    def __init__(
        self, model: Forward, storage: KVStorage, ops: Ops, size: int, other_sizes: Iterable[int] = ()
    ) -> None:
        self.sizes = tuple(sorted({size, *other_sizes}))
        self._spare_rows = max(size - ROUNDED_TILE_TOKENS // 2, 0)
        self._model = model
        self._storage = storage
        self._ops = ops
        is_on_cpu = storage.device.type == "cpu"
        self._heads = [part for part in model.parts() if is_on_cpu and isinstance(part, Float32Head)]
        self.set_head_rows(size)

    def set_head_rows(self, size: int) -> None:
        """Set the number of rows that each `Float32Head` multiplies at a time. Has no effect on a GPU."""
        for head in self._heads:
            head.tile_rows = size

    def run_idle(self) -> torch.Tensor:
        """Run a tile that writes no KV and reads no block, and return the logits of one row."""
        groups, zeros = self._storage.num_groups, np.zeros(self.sizes[0], np.int64)
        tables, slots = np.zeros((groups, 1, 1), np.int32), np.full((groups, self.sizes[0]), -1)
        lengths = np.zeros(2, np.int32)
        logits = self._run(Tile(zeros, zeros, slots, tables, lengths[:1], lengths, zeros[:1]))
        assert logits is not None, "a row is sampled"
        return logits

    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Return the logits of a step's sampled rows, (num_samples, vocabulary), or None when nothing is sampled."""
        tile_logits = [
            logits
            for tile in split_into_tiles(inputs, self.sizes, self._spare_rows)
            if (logits := self._run(tile)) is not None
        ]
        return torch.cat(tile_logits) if tile_logits else None

    def _run(self, tile: Tile) -> torch.Tensor | None:
        ids, positions = self._to_device(tile.input_ids), self._to_device(tile.positions)
        context, count = self._context(tile), len(tile.sample_rows)
        if not count:
            self._model.fill(ids, positions, context)
            return None
        rows = tile.sample_rows
        if not self._heads:
            rows = _padded(rows, len(tile.input_ids), rows[0])
        return self._model.logits(ids, positions, context, self._to_device(rows))[:count]

    def _to_device(self, array: Int64 | Int32) -> torch.Tensor:
        return torch.from_numpy(array).to(self._storage.device)

    def _context(self, tile: Tile) -> PagedContext:
        prefill = PrefillBatch(
            block_tables=tuple(map(self._to_device, tile.block_tables)),
            seq_lens=self._to_device(tile.seq_lens),
            max_seq_len=max(int(tile.seq_lens.max()), 1),
            query_start=self._to_device(tile.query_start),
            max_query_len=max(int(np.diff(tile.query_start).max()), 1),
            lengths=HostLengths(tile.query_start, tile.seq_lens),
            is_fixed=True,
        )
        slots = tuple(map(self._to_device, tile.slot_mapping))
        return _TileContext(self._storage, self._ops, slots, 0, decode=None, prefill=prefill)


class _TileContext(PagedContext):
    """Step context that zeroes the attention output of padding tokens, because uninitialized memory may contain NaN."""

    def attend_written(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        out = query.new_zeros(*query.shape[:2], options.value_dim(query))
        return self.attend_into(query, kv, options, out)


def _padded(array: Int64, size: int, value: int) -> Int64:
    filled = np.full((*array.shape[:-1], size), value, np.int64)
    filled[..., : array.shape[-1]] = array
    return filled
