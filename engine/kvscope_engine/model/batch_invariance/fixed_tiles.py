"""A step computed in tiles of a fixed number of tokens, so that a token's numbers do not depend on what runs beside it.

oneDNN, cuBLAS, and torch's own loops, choose how they add by how many rows there are: a row of a product of 64 rows and
of one has other last bits. Where each product has the same number of rows, only a row's place in its tile changes, and
that it gives the same bits at every place is proven at load, as is on a CPU which other sizes give them, too
(`tile_check`). Decodes go the way of prompts: attention of prefill.c, and on a GPU that with
`QueryRuns.is_fixed`, gives a token the same wherever its run was cut (decode's own adds in another order).

A tile runs through all layers before the next one: what it reads of its own requests was written by those before it.
Knows neither policy nor sampling.
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
"""By the type of activations. Measured on one core, a product of (576, 3072): 32 rows of bfloat16 take 1.2 times as
long as one, 16 of float32 1.7 times; a row of a tile takes 1.4 and 1.3 times as long as one of 64."""
ROUNDED_TILE_TOKENS: Final = 8
"""Where weights have few bits: such products take a time for each row. A decode of the default model alone took 8 times
as long in tiles of 32, prompts as long as without tiles."""
GPU_TILE_TOKENS: Final = 128
"""Of any type. By what GPUs are sold with, reading 16-bit weights takes as long as multiplying 75 (RTX 3090) to 300
(H100) rows by them; not measured."""
OTHER_SIZES: Final = (1, 4, 16, 64)
"""Are used besides on a CPU where they are proven to give the same bits: products of few bits and many of float32
do."""
_MORE_ROWS: Final = 1.25
"""Than there are tokens left are computed at most, and some to spare, where smaller tiles would do: each tile reads all
weights, so that rows cost little beside it where these are whole."""


def tile_tokens(device_type: str, dtype: torch.dtype, quantization: str) -> int:
    """Tokens a tile; 0: attention of this type adds by the batch."""
    if device_type == "cuda":
        return GPU_TILE_TOKENS
    size = TILE_TOKENS.get(dtype, 0)
    return size if quantization == "none" else min(size, ROUNDED_TILE_TOKENS)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some tokens of a step, in its order, filled up with such as write nowhere and are read by nobody."""

    input_ids: Int64
    """(size,); so are the next."""
    positions: Int64
    slot_mapping: Int64
    """(G, size)."""
    block_tables: Int32
    """(G, S, max_blocks) of the sequences that have tokens in it."""
    seq_lens: Int32
    """(S,), up to their last tokens in it."""
    query_start: Int32
    """(S + 1,), from 0."""
    sample_rows: Int64


def tiles_of(inputs: StepInputs, sizes: Sequence[int], spare_rows: int = 0) -> Iterator[Tile]:
    """The step's tokens in tiles of these sizes, which ascend. `spare_rows` may be computed for nothing."""
    starts, end = inputs.query_start, 0
    while (begin := end) < inputs.num_tokens:
        size = _next_size(inputs.num_tokens - begin, sizes, spare_rows)
        end = min(begin + size, inputs.num_tokens)
        first = int(np.searchsorted(starts, begin, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        cut = np.clip(starts[first : last + 1], begin, end)
        still_to_come = starts[first + 1 : last + 1] - cut[1:]
        is_here = (inputs.sample_rows >= begin) & (inputs.sample_rows < end)
        yield Tile(
            _filled_up(inputs.input_ids[begin:end], size, 0),
            _filled_up(inputs.positions[begin:end], size, 0),
            _filled_up(inputs.slot_mapping[:, begin:end], size, -1),
            np.ascontiguousarray(inputs.block_tables[:, first:last]),
            (inputs.seq_lens[first:last] - still_to_come).astype(np.int32),
            (cut - begin).astype(np.int32),
            inputs.sample_rows[is_here] - begin,
        )


def _next_size(num_tokens: int, sizes: Sequence[int], spare_rows: int) -> int:
    """The smallest that takes all of so many tokens, if it is not much too large; else the largest that is filled."""
    enough = next((size for size in sizes if size >= num_tokens), None)
    filled = next((size for size in reversed(sizes) if size <= num_tokens), None)
    if enough is not None and (filled is None or enough <= _MORE_ROWS * num_tokens + spare_rows):
        return enough
    assert filled is not None, "one of the sizes is enough, or is filled"
    return filled


class FixedTiles:
    """Runs a model, `size` tokens at a time, over the blocks of `storage`.

    `others` are sizes that give the same bits. The head's products have as many rows as the tile; on a CPU those of a
    head of ours have `size`, whatever the tile.
    """

    def __init__(self, model: Forward, storage: KVStorage, ops: Ops, size: int, others: Iterable[int] = ()) -> None:
        self.sizes = tuple(sorted({size, *others}))
        self._spare_rows = max(size - ROUNDED_TILE_TOKENS // 2, 0)
        self._model = model
        self._storage = storage
        self._ops = ops
        is_on_cpu = storage.device.type == "cpu"
        self._heads = [part for part in model.parts() if is_on_cpu and isinstance(part, Float32Head)]
        self.set_head_rows(size)

    def set_head_rows(self, size: int) -> None:
        """How many rows the products of a head of ours have."""
        for head in self._heads:
            head.tile_rows = size

    def run_idle(self) -> torch.Tensor:
        """A tile that writes nowhere and reads no block: logits of one row."""
        groups, nothing = self._storage.num_groups, np.zeros(self.sizes[0], np.int64)
        tables, slots = np.zeros((groups, 1, 1), np.int32), np.full((groups, self.sizes[0]), -1)
        lengths = np.zeros(2, np.int32)
        found = self._run(Tile(nothing, nothing, slots, tables, lengths[:1], lengths, nothing[:1]))
        assert found is not None, "a row is sampled"
        return found

    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Of the sampled rows of a step, (num_samples, vocabulary); None when nothing is sampled."""
        found = [
            logits for tile in tiles_of(inputs, self.sizes, self._spare_rows) if (logits := self._run(tile)) is not None
        ]
        return torch.cat(found) if found else None

    def _run(self, tile: Tile) -> torch.Tensor | None:
        ids, positions = self._put(tile.input_ids), self._put(tile.positions)
        context, count = self._context(tile), len(tile.sample_rows)
        if not count:
            self._model.fill(ids, positions, context)
            return None
        rows = tile.sample_rows
        if not self._heads:
            rows = _filled_up(rows, len(tile.input_ids), rows[0])
        return self._model.logits(ids, positions, context, self._put(rows))[:count]

    def _put(self, array: Int64 | Int32) -> torch.Tensor:
        """On the device; a GPU's copy is waited for."""
        return torch.from_numpy(array).to(self._storage.device)

    def _context(self, tile: Tile) -> PagedContext:
        prefill = PrefillBatch(
            block_tables=tuple(map(self._put, tile.block_tables)),
            seq_lens=self._put(tile.seq_lens),
            max_seq_len=max(int(tile.seq_lens.max()), 1),
            query_start=self._put(tile.query_start),
            max_query_len=max(int(np.diff(tile.query_start).max()), 1),
            lengths=HostLengths(tile.query_start, tile.seq_lens),
            is_fixed=True,
        )
        slots = tuple(map(self._put, tile.slot_mapping))
        return _TileContext(self._storage, self._ops, slots, 0, decode=None, prefill=prefill)


class _TileContext(PagedContext):
    """Attention gives zeros to the tokens that fill a tile up: what is left in memory might be no number."""

    def attend_written(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        """(T, Hq, D) -> (T, Hq, D)."""
        out = query.new_zeros(*query.shape[:2], options.value_dim(query))
        return self.attend_into(query, kv, options, out)


def _filled_up(array: Int64, size: int, value: int) -> Int64:
    """Along its last axis."""
    filled = np.full((*array.shape[:-1], size), value, np.int64)
    filled[..., : array.shape[-1]] = array
    return filled
