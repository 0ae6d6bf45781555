"""Recurrent layers run in chunks with several sequences equal transformers run on whole sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.engine.recurrent_models import FAMILIES, ONE_BY_ONE, WITHOUT_ATTENTION, recurrent_model, sampled
from torch import nn

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.kv_cache.state_storage import StateStorage, state_bytes
from kvscope_engine.model.layers.recurrent import recurrent_layers as recurrent
from kvscope_engine.model.layers.recurrent.recurrent_layers import (
    RecurrentLayer,
    StateBatch,
    StateDecodes,
    StateStep,
    recurrent_layers,
)
from kvscope_engine.model.verification.check_script import CheckSequence, CheckStep, ScriptPiece, check_context
from kvscope_engine.model.verification.fuse import fuse_model
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_kernels import ops_for
from kvscope_telemetry.errors import BadInput

BLOCK_SIZE = 8
LENGTHS = (21, 1, 17, 30)
CPU = torch.device("cpu")


def sequences_of(vocabulary: int) -> list[CheckSequence]:
    """Return random sequences in random blocks; the first block of each also is its state slot."""
    generator, blocks = torch.Generator().manual_seed(1), list(range(16))
    random.Random(1).shuffle(blocks)
    found, row = [], 0
    for length in LENGTHS:
        ids = torch.randint(3, vocabulary, (length,), generator=generator)
        table = tuple(blocks.pop() for _ in range(-(-length // BLOCK_SIZE)))
        found.append(CheckSequence(ids, torch.arange(length), row, table))
        row += length
    return found


def random_steps(sequences: list[CheckSequence], seed: int) -> Iterator[CheckStep]:
    """Return chunks of 1 to 9 tokens of some sequences, single tokens first, until all were run."""
    chance, done = random.Random(seed), dict.fromkeys(range(len(sequences)), 0)
    while left := [number for number, count in done.items() if count < sequences[number].length]:
        pieces = []
        for number in chance.sample(left, chance.randint(1, len(left))):
            start = done[number]
            done[number] = min(start + chance.choice((1, 1, 2, 5, 9)), sequences[number].length)
            pieces.append(ScriptPiece(sequences[number], start, done[number]))
        yield CheckStep(tuple(sorted(pieces, key=lambda piece: piece.end - piece.start > 1)))


@torch.inference_mode()
def logits_in_pieces(module: nn.Module, sequences: list[CheckSequence], seed: int) -> torch.Tensor:
    shapes = [call.shape for call in check_hook(module)]
    storage = KVStorage(16, BLOCK_SIZE, shapes, torch.float32, CPU)
    states = StateStorage(16, recurrent_layers(module).states, CPU)
    for tensor in (*storage.block_tensors, *states.slot_tensors):
        tensor.fill_(float("nan"))
    logits = torch.zeros(sum(LENGTHS), module.config.vocab_size)  # type: ignore[union-attr, arg-type]
    for step in random_steps(sequences, seed):
        context = check_context(step, storage, ops_for("cpu"), states)
        ids, positions = step.gather("ids")[None], step.gather("positions")[None]
        logits[step.rows] = module(input_ids=ids, position_ids=positions, use_cache=False, paged=context).logits[0]
    return logits


@torch.inference_mode()
def whole_logits(module: nn.Module, sequences: list[CheckSequence]) -> torch.Tensor:
    return torch.cat([module(input_ids=each.ids[None], use_cache=False).logits[0] for each in sequences])


@pytest.mark.parametrize("family", sampled())
def test_chunks_of_several_sequences_equal_whole_sequences(family: str) -> None:
    module = recurrent_model(family)
    sequences = sequences_of(96)
    wanted = whole_logits(module, sequences)
    check_hook(module)
    for layer in recurrent_layers(module).layers:
        assert layer.supports_pieces is (family not in ONE_BY_ONE), layer.name
        assert layer.supports_batches is (family != "rwkv"), layer.name
    bound = 1e-3 * float(wanted.std())
    assert float((logits_in_pieces(module, sequences, 1) - wanted).abs().max()) < bound
    fuse_model(module)
    assert float((logits_in_pieces(module, sequences, 2) - wanted).abs().max()) < bound, "with fused parts"


@pytest.mark.parametrize("family", ["zamba2", "nemotron_h"])
def test_limited_time_steps_do_not_depend_on_the_chunks(family: str) -> None:
    """transformers applies the limit for several tokens but not for a single one."""
    module = recurrent_model(family)
    sequences = sequences_of(96)
    wanted = whole_logits(module, sequences)
    check_hook(module)
    assert float((logits_in_pieces(module, sequences, 1) - wanted).abs().max()) < 1e-3 * float(wanted.std())


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2", "jamba", "mamba2", "recurrent_gemma", "zamba2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recurrent_layers_work_in_16_bits(family: str, dtype: torch.dtype) -> None:
    module = recurrent_model(family, dtype)
    calls = check_hook(module)
    assert [call.layer for call in calls] == list(range(len(calls)))
    assert bool(calls) is (family not in WITHOUT_ATTENTION)
    assert fuse_model(module) is fuse_model(module)


@pytest.mark.parametrize("slots", [(3, 1, 2), (5, 0, 3)], ids=["side by side", "anywhere"])
@torch.inference_mode()
def test_batched_decodes_equal_single_decodes(slots: tuple[int, ...]) -> None:
    module = recurrent_model("mamba2")
    check_hook(module)
    layers = recurrent_layers(module)
    layer, storage = layers.layers[0], StateStorage(6, layers.states, CPU)
    before = [tensor.normal_().clone() for tensor in storage.slot_tensors]
    given, strides, forward = torch.randn(1, 3, 32), [], layer.forward

    def watched(**kwargs: Any) -> Any:
        strides.append(kwargs["hidden_states"].stride())
        return forward(**kwargs)

    layer.forward = watched
    together = StateBatch(storage, slots, [True] * 3, [0, 1, 2, 3]).run(layer, {"hidden_states": given})
    assert strides == [(32, 32, 1)], "of others torch's products copy their weights for each sequence"
    after = [tensor.clone() for tensor in storage.slot_tensors]
    for tensor, old in zip(storage.slot_tensors, before, strict=True):
        tensor.copy_(old)
    for row, slot in enumerate(slots):
        alone = StateBatch(storage, [slot], [True], [0, 1]).run(layer, {"hidden_states": given[:, row : row + 1]})
        torch.testing.assert_close(together[:, row : row + 1], alone)
    for tensor, found in zip(storage.slot_tensors, after, strict=True):
        torch.testing.assert_close(found, tensor)


@pytest.mark.parametrize("family", sampled(family for family in FAMILIES if family != "rwkv"))
@torch.inference_mode()
def test_recurrent_decode_with_state_slots_as_in_graphs_equals_the_plain_step(family: str) -> None:
    """States lie in arbitrary slots, next to padding rows."""
    module = recurrent_model(family)
    shapes = [call.shape for call in check_hook(module)]
    assert recurrent_layers(module).batches_decodes
    kv = KVStorage(16, BLOCK_SIZE, shapes, torch.float32, CPU)
    states = StateStorage(16, recurrent_layers(module).states, CPU, has_pad=True)
    tensors = (*kv.block_tensors, *states.slot_tensors)
    for tensor in tensors:
        tensor.zero_()
    sequences = [each for each in sequences_of(96) if each.length > 1]

    def run(step: CheckStep, step_states: StateStep | None = None) -> torch.Tensor:
        context = check_context(step, kv, ops_for("cpu"), states)
        if step_states is not None:
            context.states = step_states
        ids, positions = step.gather("ids")[None], step.gather("positions")[None]
        logits: torch.Tensor = module(input_ids=ids, position_ids=positions, use_cache=False, paged=context).logits[0]
        return logits

    run(CheckStep(tuple(ScriptPiece(each, 0, each.length - 1) for each in sequences)))
    before = [tensor.clone() for tensor in tensors]
    decodes = CheckStep(tuple(ScriptPiece(each, each.length - 1, each.length) for each in sequences))
    slots = [each.table[0] for each in sequences]
    wanted = run(decodes, StateBatch(states, slots, [True] * len(slots), range(len(slots) + 1)))
    after = [tensor.clone() for tensor in tensors]
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)
    found = run(decodes, StateDecodes(states, torch.tensor(slots)))
    assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.std())
    for tensor, expected in zip(tensors, after, strict=True):
        torch.testing.assert_close(tensor, expected)
    for tensor in states.slot_tensors:
        assert not tensor[states.pad_slot].any(), "the padding slot must stay zero"


def test_state_size_of_a_request_is_measured() -> None:
    module = recurrent_model("qwen3_next")
    check_hook(module)
    [first, second] = recurrent_layers(module).states
    assert first == second
    assert [(part.kind, part.shape) for part in first] == [("conv", (64, 4)), ("recurrent", (4, 8, 8))]
    assert state_bytes([first, second]) == 2 * 4 * (64 * 4 + 4 * 8 * 8)


def test_attention_layers_are_numbered_separately() -> None:
    module = recurrent_model("nemotron_h")
    [call] = check_hook(module)
    assert (call.layer, call.location.layer) == (0, 1)
    assert [layer.name for layer in recurrent_layers(module).layers] == ["model.layers.0.mixer", "model.layers.3.mixer"]


def never_goes_on(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, given, states, *, has_initial_state: call(self, given, states, has_initial_state=False)


def forgets_between_pieces(call: Callable[..., Any]) -> Callable[..., Any]:
    """Emulate layers that lose their state between chunks, as RecurrentGemma's would if that were not detected."""

    def wrong(self: RecurrentLayer, given: dict[str, Any], states: Any, *, has_initial_state: bool) -> Any:
        is_one = next(iter(given.values())).shape[1] == 1
        return call(self, given, states, has_initial_state=has_initial_state and is_one)

    return wrong


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2", "mamba", "rwkv"])
def test_model_whose_recurrent_state_is_lost_is_refused_at_load(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = recurrent_model(family)
    monkeypatch.setattr(RecurrentLayer, "call", never_goes_on(RecurrentLayer.call))
    with pytest.raises(BadInput, match=r"is not supported: .* differ from those of eager attention"):
        check_hook(module)


def test_state_lost_between_chunks_is_detected_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    module = recurrent_model("mamba2")
    monkeypatch.setattr(RecurrentLayer, "call", forgets_between_pieces(RecurrentLayer.call))
    check_hook(module)
    assert not any(layer.supports_pieces for layer in recurrent_layers(module).layers), "tokens must run one by one"


def test_mixed_up_states_are_detected_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    module = recurrent_model("qwen3_next")
    made = recurrent.StateBatch.__post_init__

    def all_in_one(self: recurrent.StateBatch) -> None:
        self.slots = [0] * len(self.slots)
        made(self)

    monkeypatch.setattr(recurrent.StateBatch, "__post_init__", all_in_one)
    with pytest.raises(BadInput, match=r"output of recurrent layer 0"):
        check_hook(module)


def test_model_with_unknown_states_is_refused_by_name() -> None:
    module = recurrent_model("qwen3_next")

    class Unknown(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            return hidden_states.cumsum(1)

    module.model.layers[0].linear_attn = Unknown()  # type: ignore[union-attr, index]
    with pytest.raises(BadInput, match=r"Qwen3NextForCausalLM is not supported: the results of paged attention differ"):
        check_hook(module)
