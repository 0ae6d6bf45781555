"""Step messages to ranks round trip."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_engine.model.executor.rank_messages import (
    FillLoraSlot,
    RankSettings,
    Step,
    decode_to_rank,
    deltas_of,
    encode,
    fill_of,
    inputs_of,
    step_of,
)
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.layers.lora.peft_folder import Delta


def step(num_tokens: int, num_seqs: int, width: int) -> StepInputs:
    rng = np.random.default_rng(num_tokens)
    wide = rng.integers(0, 99, (2, num_seqs, width + 3)).astype(np.int32)
    return StepInputs(
        input_ids=rng.integers(0, 99, num_tokens),
        positions=np.arange(num_tokens),
        slot_mapping=rng.integers(-1, 99, (2, num_tokens)),
        block_tables=wide[:, :, :width],  # as in a real step: part of a wider table
        seq_lens=np.full(num_seqs, 5, np.int32),
        query_start=np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32),
        num_single_token=1,
        sample_rows=np.arange(1),
    )


@pytest.mark.parametrize("copies", [[], [(3, 7), (1 << 40, 2)]])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 3, 5)])
def test_rank_step_message_decoded_from_its_encoding_is_equal(
    sizes: tuple[int, int, int], copies: list[tuple[int, int]]
) -> None:
    sent = step(*sizes)
    slots = np.arange(-1, len(sent.input_ids) - 1)
    message = decode_to_rank(encode(step_of(sent, copies, slots)))
    assert isinstance(message, Step)
    progress_events, copied, lora_slots = inputs_of(message)
    assert copied == copies
    assert lora_slots is not None
    assert lora_slots.tolist() == slots.tolist()
    assert progress_events.num_single_token == sent.num_single_token
    for name in ("input_ids", "positions", "slot_mapping", "block_tables", "seq_lens", "query_start"):
        found, expected = getattr(progress_events, name), getattr(sent, name)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
        found[...] = 0  # torch needs writable arrays


def test_rank_adapter_message_decoded_from_its_encoding_is_equal() -> None:
    delta = Delta(torch.randn(2, 6)[:, ::2].bfloat16(), torch.randn(5, 2).bfloat16())
    message = decode_to_rank(encode(fill_of("model.layers.0.q_proj", 3, [delta, None])))
    assert isinstance(message, FillLoraSlot)
    assert (message.stack, message.slot) == ("model.layers.0.q_proj", 3)
    progress_events, nothing = deltas_of(message, torch.bfloat16)
    assert nothing is None
    assert progress_events is not None
    assert torch.equal(progress_events.a, delta.a)
    assert torch.equal(progress_events.b, delta.b)


def test_rank_begin_message_decoded_from_its_encoding_is_equal() -> None:
    begin = RankSettings(num_blocks=7, float32_residual=True)
    assert decode_to_rank(encode(begin)) == begin
