"""Proves at load that deterministic mode works: a token's results are the same at every position in a tile.

Runs three trials: a sequence alone, the same sequence after another one that shifts its position in the tiles, and its
last tokens in steps of one token. Keys and values of all layers and the last logits must be bitwise equal; otherwise
the model is refused with the reason.
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

from kvscope_engine.model.batch_invariance.fixed_tiles import OTHER_TILE_SIZES, FixedTiles, tile_tokens
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
NUM_SINGLE_TOKEN_STEPS: Final = 3
"""Number of tokens at a sequence's end that the check computes in steps of one token."""
NUM_COMPARED: Final = 1_000_000
"""Minimum number of elements of hidden states that another tile size must reproduce, if the model's position limit
allows.

A small sample is not enough: on an AMD processor with AVX-512 BF16, matmuls of one row differ from those of 32 rows in
one of 8,000 elements, and a trial of two tokens found no difference.
"""


def proven_tiles(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the tile size that gives a token the same bits at every position, followed by other sizes with the same
    bits.

    Raises:
        BadInput: This cannot be proven for the model or machine. The message has one line.
    """
    size = tile_tokens(loaded.device.type, loaded.dtype, loaded.quantization)
    ops = ops_for(loaded.device.type)
    reason = _refusal_reason(loaded, size) or differing_part(loaded.module, size, ops)
    if reason:
        raise BadInput(f"deterministic=True is not accepted with model {loaded.info.name!r}: {reason}")
    return (size, *(_equal_sizes(loaded.module, size, ops) if loaded.device.type == "cpu" else ()))


def differing_part(module: nn.Module, size: int, ops: Ops) -> str:
    """Describe the first layer whose result depends on a token's position in tiles of `size`; empty if there is
    none."""
    with _trial(module, size, ops, size + size // 2) as trial:
        return trial.first_difference()


def _equal_sizes(module: nn.Module, size: int, ops: Ops) -> list[int]:
    with _trial(module, size, ops, max(OTHER_TILE_SIZES) + 1) as trial:
        return [other for other in OTHER_TILE_SIZES if other != size and trial.is_equal_in(other)]


@contextmanager
def _trial(module: nn.Module, size: int, ops: Ops, length: int) -> Iterator[_Trial]:
    trial = _Trial(module, size, ops, length)
    try:
        with torch.inference_mode():
            yield trial
    finally:
        trial.storage.close()


def _refusal_reason(loaded: LoadedModel, size: int) -> str:
    is_on_cpu = loaded.device.type == "cpu"
    if not is_on_cpu and os.environ.get(_TUNABLE, "0") != "0":
        return f"with {_TUNABLE}, each start chooses matrix products by timing"
    if not size:
        return (
            f"with {str(loaded.dtype).removeprefix('torch.')}, the order of additions in attention depends on the "
            "batch (not with float32 and bfloat16)"
        )
    if is_on_cpu and library() is None:
        return "the CPU's own attention could not be compiled on this machine"
    module: Any = loaded.module
    if own_forward(module) is not None:
        return "it is run by transformers' own code"
    if recurrent_layers(module).layers:
        return "the order of additions in its recurrent layers depends on how a prompt is split"
    config = module.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return "the number of rows per expert depends on the batch"
    return next(filter(None, (_layer_refusal_reason(call, is_on_cpu=is_on_cpu) for call in check_hook(module))), "")


def _layer_refusal_reason(call: LayerCall, *, is_on_cpu: bool) -> str:
    if call.shape.latent_dim:
        return "its attention over latents has two methods with different orders of additions"
    if call.options.bias is not None:
        return "its attention runs with torch's operations, whose order of additions depends on the batch"
    is_odd = is_on_cpu and call.shape.head_dim % 2
    return f"its heads have an odd size, {call.shape.head_dim}" if is_odd else ""


@dataclass(frozen=True, slots=True)
class _TokenRange:
    """Tokens `start` to `end` of a sequence, computed in one step. Their KV is written to the blocks in `table`."""

    ids: Int64
    table: list[int]
    start: int
    end: int


class _Trial:
    """Computes two token sequences alone and combined, in a few blocks of KV storage, and compares their keys, values
    and logits.
    """

    def __init__(self, module: Any, size: int, ops: Ops, length: int) -> None:
        config = module.config.get_text_config(decoder=True)
        self.length = min(length, position_limit(config) or size)
        self.size = size
        vocabulary = int(config.vocab_size)
        indices = np.arange(self.length, dtype=np.int64)
        self.ids, self.other_ids = (indices * 37 + 11) % vocabulary, (indices * 53 + 5) % vocabulary
        num_blocks = -(-self.length // BLOCK_SIZE)
        first_blocks = range(1, 1 + num_blocks)
        self.table, self.trial_table, self.other_table = (
            [block + index * num_blocks for block in first_blocks] for index in range(3)
        )
        """Blocks of the sequence computed alone, of the same sequence in a trial, and of the other sequence."""
        parameter = next(module.parameters())
        shapes = [call.shape for call in check_hook(module)]
        self.storage = KVStorage(1 + 3 * num_blocks, BLOCK_SIZE, shapes, parameter.dtype, parameter.device)
        for tensor in self.storage.block_tensors:
            tensor.zero_()
        self._numbers_per_token = int(config.hidden_size) * len(shapes)
        self._model, self._ops = Forward(module), ops

    def is_equal_in(self, size: int) -> bool:
        """Whether tiles of `size` give the same bits, tested on two sequences of at least two tiles each."""
        length = min(self.length, max(size + 1, -(-NUM_COMPARED // (2 * self._numbers_per_token))))
        for ids in (self.ids, self.other_ids):
            expected = self._run(_TokenRange(ids, self.table, 0, length))
            actual = self._run(_TokenRange(ids, self.trial_table, 0, length), size=size)
            if not torch.equal(actual, expected) or not self._is_same_in_all_layers(length):
                return False
        return True

    def first_difference(self) -> str:
        """Run the sequence alone, then behind parts of the other sequence, and describe the first difference; "" if
        there is none.
        """
        expected = self._run(_TokenRange(self.ids, self.table, 0, self.length))
        for num_other in (1, self.size // 2 - 1, self.size - NUM_SINGLE_TOKEN_STEPS):
            actual = self._logits_after_other(num_other)
            layers = range(len(self.storage.layers))
            layer = next((layer for layer in layers if not self._is_same(layer, self.length)), None)
            if layer is not None:
                return (
                    f"on this machine, the results of layer {layer} for a token depend on the other tokens in the tile"
                )
            if not torch.equal(actual, expected):
                return (
                    "on this machine, the results of its last layers for a token depend on the other tokens in the tile"
                )
        return ""

    def _logits_after_other(self, num_other: int) -> torch.Tensor:
        """Run the sequence in the same steps as the other sequence, and return the logits of its last token.

        The first step has `num_other` tokens of the other sequence before those of the sequence. Each later step has
        one token of each. In the later steps, the output layer also computes `num_other` rows before the sampled one.
        """
        num_other = min(num_other, self.length - NUM_SINGLE_TOKEN_STEPS)
        start = self.length - NUM_SINGLE_TOKEN_STEPS
        other = _TokenRange(self.other_ids, self.other_table, 0, num_other)
        logits = self._run(other, _TokenRange(self.ids, self.trial_table, 0, start))
        for step in range(NUM_SINGLE_TOKEN_STEPS):
            other = _TokenRange(self.other_ids, self.other_table, num_other + step, num_other + step + 1)
            logits = self._run(
                other,
                _TokenRange(self.ids, self.trial_table, start + step, start + step + 1),
                num_rows_before=num_other,
            )
        return logits

    def _run(self, *ranges: _TokenRange, size: int | None = None, num_rows_before: int = 0) -> torch.Tensor:
        """Run the token ranges as one step and return the logits of the last token, (vocabulary,).

        Tiles have `size` tokens (default: the trial's), except in a `Float32Head`, which always has the trial's. The
        output layer computes `num_rows_before` other rows before that of the last token.
        """
        tiles = FixedTiles(self._model, self.storage, self._ops, size or self.size)
        tiles.set_head_rows(self.size)
        logits = tiles.logits(_inputs(ranges, num_rows_before))
        assert logits is not None, "the last token is sampled"
        return logits[-1].clone()

    def _is_same_in_all_layers(self, length: int) -> bool:
        return all(self._is_same(layer, length) for layer in range(len(self.storage.layers)))

    def _is_same(self, layer: int, length: int) -> bool:
        """Whether `table` and `trial_table` have the same keys and values for the first `length` tokens of a layer."""
        return all(
            torch.equal(cache[self.table].flatten(0, 1)[:length], cache[self.trial_table].flatten(0, 1)[:length])
            for cache in self.storage.kv(layer)
        )


def _inputs(ranges: tuple[_TokenRange, ...], num_rows_before: int) -> StepInputs:
    """Return a step of these token ranges that samples its last token. Before this row, the output layer computes
    the row of the first token `num_rows_before` times.
    """
    positions = [np.arange(token_range.start, token_range.end) for token_range in ranges]
    slots = [
        np.array(token_range.table)[range_positions // BLOCK_SIZE] * BLOCK_SIZE + range_positions % BLOCK_SIZE
        for token_range, range_positions in zip(ranges, positions, strict=True)
    ]
    ends = np.cumsum([token_range.end - token_range.start for token_range in ranges])
    return StepInputs(
        input_ids=np.concatenate([token_range.ids[token_range.start : token_range.end] for token_range in ranges]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots)[None],
        block_tables=np.array([[token_range.table for token_range in ranges]], np.int32),
        seq_lens=np.array([token_range.end for token_range in ranges], np.int32),
        query_start=np.array([0, *ends], np.int32),
        num_single_token=0,
        sample_rows=np.array([0] * num_rows_before + [ends[-1] - 1]),
    )
