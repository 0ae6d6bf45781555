"""A step computed in tiles of a fixed number of tokens, so that a token's numbers do not depend on what runs beside it.

oneDNN, and torch's own loops, choose how they add by how many rows there are: a row of a product of 64 rows and of one
has other last bits. Where each product has the same number of rows, only a row's place in its tile changes, and that it
gives the same bits at every place is proven at load (`checks.tile_check`). Decodes go the way of prompts: attention of
prefill.c gives a token the same wherever its run was cut (decode's own adds in another order).

A tile runs through all layers before the next one: what it reads of its own requests was written by those before it.
Knows neither policy nor sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvscope_engine.model.fused.float32_head import Float32Head
from kvscope_engine.model.running.attention import AttentionOptions, PagedContext, PrefillBatch
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.kv_storage import KVStorage, LayerKV
from kvscope_engine.model.running.step_inputs import Int32, Int64, StepInputs
from kvscope_kernels import Ops
from kvscope_kernels.host_lengths import HostLengths

TILE_TOKENS: Final = {torch.float32: 16, torch.bfloat16: 32}
"""By the type of activations. Measured on one core, a product of (576, 3072): 32 rows of bfloat16 take 1.2 times as
long as one, 16 of float32 1.7 times; a row of a tile takes 1.4 and 1.3 times as long as one of 64."""
ROUNDED_TILE_TOKENS: Final = 8
"""Where weights have few bits: such products take a time for each row. A decode of the default model alone took 8 times
as long in tiles of 32, prompts as long as without tiles."""


def tile_tokens(dtype: torch.dtype, quantization: str) -> int:
    """Tokens a tile; 0: attention of this type adds by the batch."""
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


def tiles_of(inputs: StepInputs, size: int) -> Iterator[Tile]:
    """The step's tokens, `size` at a time."""
    starts = inputs.query_start
    for begin in range(0, inputs.num_tokens, size):
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


class FixedTiles:
    """Runs a model on a CPU, `size` tokens at a time, over the blocks of `storage`."""

    def __init__(self, model: Forward, storage: KVStorage, ops: Ops, size: int) -> None:
        self.size = size
        self._model = model
        self._storage = storage
        self._ops = ops
        heads = [part for part in model.parts() if isinstance(part, Float32Head)]
        for head in heads:
            head.tile_rows = size
        self._pads_samples = not heads

    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Of the sampled rows of a step, (num_samples, vocabulary); None when nothing is sampled."""
        found = [logits for tile in tiles_of(inputs, self.size) if (logits := self._run(tile)) is not None]
        return torch.cat(found) if found else None

    def _run(self, tile: Tile) -> torch.Tensor | None:
        ids, positions = torch.from_numpy(tile.input_ids), torch.from_numpy(tile.positions)
        context, count = self._context(tile), len(tile.sample_rows)
        if not count:
            self._model.fill(ids, positions, context)
            return None
        rows = _filled_up(tile.sample_rows, self.size, tile.sample_rows[0]) if self._pads_samples else tile.sample_rows
        return self._model.logits(ids, positions, context, torch.from_numpy(rows))[:count]

    def _context(self, tile: Tile) -> PagedContext:
        prefill = PrefillBatch(
            block_tables=tuple(map(torch.from_numpy, tile.block_tables)),
            seq_lens=torch.from_numpy(tile.seq_lens),
            max_seq_len=int(tile.seq_lens.max()),
            query_start=torch.from_numpy(tile.query_start),
            max_query_len=int(np.diff(tile.query_start).max()),
            lengths=HostLengths(tile.query_start, tile.seq_lens),
        )
        slots = tuple(map(torch.from_numpy, tile.slot_mapping))
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
