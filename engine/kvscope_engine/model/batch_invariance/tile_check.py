"""Proves at load that deterministic mode works: a token's numbers are the same at every position in a tile.

Runs three trials: a sequence alone, the same sequence after another one that shifts its position in the tiles, and its
last tokens one by one. Keys and values of all layers and the last logits must be bitwise equal; otherwise the model is
refused with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from kvscope_engine.model.batch_invariance.fixed_tiles import OTHER_SIZES, FixedTiles, tile_tokens
from kvscope_engine.model.hf_config import EXPERT_COUNTS, position_limit
from kvscope_engine.model.input_batch.step_inputs import Int64, StepInputs
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.layers.own_forward import own_forward
from kvscope_engine.model.layers.recurrent.recurrent_layers import recurrent_layers
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_kernels import Ops, ops_for
from kvscope_kernels.cpu.library import library
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

BLOCK_SIZE: Final = 8
_TUNABLE: Final = "PYTORCH_TUNABLEOP_ENABLED"
NUM_SINGLE: Final = 3
"""Number of last tokens that are computed one by one."""
NUM_COMPARED: Final = 1_000_000
"""Numbers of hidden states that another tile size must reproduce, where the trial is long enough.

Few numbers are not enough: on an AMD processor with AVX-512 BF16, products of one row differ from those of 32 rows in
one of 8,000 numbers, and a trial of two tokens found no difference.
"""


def proven_tiles(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the tile size that gives a token the same bits at every position, followed by other sizes that give them
    too.

    Raises BadInput, in one line, for a model or machine for which this cannot be proven.
    """
    size = tile_tokens(loaded.device.type, loaded.dtype, loaded.quantization)
    ops = ops_for(loaded.device.type)
    why = _why_not(loaded, size) or differing_part(loaded.module, size, ops)
    if why:
        raise BadInput(f"deterministic=True is not accepted with model {loaded.info.name!r}: {why}")
    return (size, *(_equal_sizes(loaded.module, size, ops) if loaded.device.type == "cpu" else ()))


def differing_part(module: nn.Module, size: int, ops: Ops) -> str:
    """Name the first layer that gives a token other numbers at another position in tiles of `size`; empty if there is
    none."""
    with _trial(module, size, ops, size + size // 2) as trial:
        return trial.first_difference()


def _equal_sizes(module: nn.Module, size: int, ops: Ops) -> list[int]:
    with _trial(module, size, ops, max(OTHER_SIZES) + 1) as trial:
        return [other for other in OTHER_SIZES if other != size and trial.is_equal_in(other)]


@contextmanager
def _trial(module: nn.Module, size: int, ops: Ops, length: int) -> Iterator[_Trial]:
    trial = _Trial(module, size, ops, length)
    try:
        with torch.inference_mode():
            yield trial
    finally:
        trial.storage.close()


def _why_not(loaded: LoadedModel, size: int) -> str:
    is_on_cpu = loaded.device.type == "cpu"
    if not is_on_cpu and os.environ.get(_TUNABLE, "0") != "0":
        return f"{_TUNABLE} lets each start choose its products by time"
    if not size:
        return (
            f"attention of {str(loaded.dtype).removeprefix('torch.')} adds by the batch (float32 and bfloat16 do not)"
        )
    if is_on_cpu and library() is None:
        return "the CPU's own attention could not be compiled on this machine"
    module: Any = loaded.module
    if own_forward(module) is not None:
        return "it is run by transformers' own code"
    if recurrent_layers(module).layers:
        return "its recurrent layers add in pieces of a prompt"
    config = module.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return "how many rows an expert has hangs on the batch"
    return next(filter(None, (_why_not_layer(call, is_on_cpu=is_on_cpu) for call in check_hook(module))), "")


def _why_not_layer(call: LayerCall, *, is_on_cpu: bool) -> str:
    if call.shape.latent_dim:
        return "it attends over latents, by two ways that add differently"
    if call.options.bias is not None:
        return "its layers attend by torch's operations, which add by the batch"
    is_odd = is_on_cpu and call.shape.head_dim % 2
    return f"its heads have an odd size, {call.shape.head_dim}" if is_odd else ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `start` to `end` of a sequence whose blocks are listed in `table`."""

    ids: Int64
    table: list[int]
    start: int
    end: int


class _Trial:
    """Two token sequences and the storage of a few blocks in which they are computed."""

    def __init__(self, module: Any, size: int, ops: Ops, length: int) -> None:
        config = module.config.get_text_config(decoder=True)
        self.length = min(length, position_limit(config) or size)
        self.size = size
        vocabulary = int(config.vocab_size)
        numbers = np.arange(self.length, dtype=np.int64)
        self.ids, self.others = (numbers * 37 + 11) % vocabulary, (numbers * 53 + 5) % vocabulary
        count = -(-self.length // BLOCK_SIZE)
        first = range(1, 1 + count)
        self.table, self.tried, self.beside = ([block + part * count for block in first] for part in range(3))
        parameter = next(module.parameters())
        shapes = [call.shape for call in check_hook(module)]
        self.storage = KVStorage(1 + 3 * count, BLOCK_SIZE, shapes, parameter.dtype, parameter.device)
        for tensor in self.storage.block_tensors:
            tensor.zero_()
        self._numbers_per_token = int(config.hidden_size) * len(shapes)
        self._model, self._ops = Forward(module), ops
        self._expected: torch.Tensor | None = None

    def is_equal_in(self, size: int) -> bool:
        """Whether tiles of `size` give the same bits, tried on two sequences that take at least two tiles each."""
        length = min(self.length, max(size + 1, -(-NUM_COMPARED // (2 * self._numbers_per_token))))
        for ids in (self.ids, self.others):
            expected = self._run(_Piece(ids, self.table, 0, length))
            found = self._run(_Piece(ids, self.tried, 0, length), size=size)
            if not torch.equal(found, expected) or not self._is_same_in_all_layers(length):
                return False
        return True

    @property
    def expected(self) -> torch.Tensor:
        """Logits of the last token when the sequence is computed alone."""
        if self._expected is None:
            self._expected = self._run(_Piece(self.ids, self.table, 0, self.length))
        return self._expected

    def first_difference(self) -> str:
        """Describe the first difference between the trials; empty if there is none."""
        expected = self.expected
        for before in (1, self.size // 2 - 1, self.size - NUM_SINGLE):
            found = self._beside(before)
            layers = range(len(self.storage.layers))
            layer = next((layer for layer in layers if not self._is_same(layer, self.length)), None)
            if layer is not None:
                return f"layer {layer} gives a token other numbers beside other tokens, on this machine"
            if not torch.equal(found, expected):
                return "its last layers give a token other numbers beside other tokens, on this machine"
        return ""

    def _beside(self, before: int) -> torch.Tensor:
        """Compute the sequence after `before` tokens of the other one, then its last tokens one by one, in steps shared
        with it.

        For the last tokens, the head also gets `before` rows in front. Returns the last token's logits.
        """
        before = min(before, self.length - NUM_SINGLE)
        start = self.length - NUM_SINGLE
        other = _Piece(self.others, self.beside, 0, before)
        found = self._run(other, _Piece(self.ids, self.tried, 0, start))
        for step in range(NUM_SINGLE):
            other = _Piece(self.others, self.beside, before + step, before + step + 1)
            found = self._run(other, _Piece(self.ids, self.tried, start + step, start + step + 1), head_rows=before)
        return found

    def _run(self, *pieces: _Piece, size: int | None = None, head_rows: int = 0) -> torch.Tensor:
        """Run the pieces as one step and return the logits of the last token, (vocabulary,).

        Tiles have `size` tokens (default: the trial's), except in a `Float32Head`. `head_rows` other rows precede the
        last token's in the head.
        """
        tiles = FixedTiles(self._model, self.storage, self._ops, size or self.size)
        tiles.set_head_rows(self.size)
        logits = tiles.logits(_inputs(pieces, head_rows))
        assert logits is not None, "the last token is sampled"
        return logits[-1].clone()

    def _is_same_in_all_layers(self, length: int) -> bool:
        return all(self._is_same(layer, length) for layer in range(len(self.storage.layers)))

    def _is_same(self, layer: int, length: int) -> bool:
        """Whether both tables hold the same keys and values of the first `length` tokens."""
        return all(
            torch.equal(kept[self.table].flatten(0, 1)[:length], kept[self.tried].flatten(0, 1)[:length])
            for kept in self.storage.kv(layer)
        )


def _inputs(pieces: tuple[_Piece, ...], head_rows: int) -> StepInputs:
    """Return a step of these pieces. Its first token is sampled `head_rows` times before the last one."""
    places = [np.arange(piece.start, piece.end) for piece in pieces]
    slots = [
        np.array(piece.table)[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        for piece, place in zip(pieces, places, strict=True)
    ]
    ends = np.cumsum([piece.end - piece.start for piece in pieces])
    return StepInputs(
        input_ids=np.concatenate([piece.ids[piece.start : piece.end] for piece in pieces]),
        positions=np.concatenate(places),
        slot_mapping=np.concatenate(slots)[None],
        block_tables=np.array([[piece.table for piece in pieces]], np.int32),
        seq_lens=np.array([piece.end for piece in pieces], np.int32),
        query_start=np.array([0, *ends], np.int32),
        num_single_token=0,
        sample_rows=np.array([0] * head_rows + [ends[-1] - 1]),
    )
