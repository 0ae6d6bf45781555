"""A linear layer with LoRA deltas gives W x + B A x with each row's own adapter, for every class of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.layers.fused.int8_linear import Int8Linear, can_round
from kvscope_engine.model.layers.fused.packed_linear import FusedLinear, PackedLinear, can_pack
from kvscope_engine.model.layers.lora.lora_linear import LoraLinear, LoraStack, LoraStepState, OutputSlice, StepSlots
from kvscope_engine.model.layers.lora.peft_folder import Delta
from kvscope_engine.model.layers.recurrent.recurrent_layers import CallRows
from kvscope_kernels.quantized_linear.grouped_weight import rounded

IN, SIZES, RANK, SLOTS = 64, (96, 32), 4, 3
OUT = sum(SIZES)


def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT).requires_grad_(False)


KINDS: dict[str, Callable[[nn.Linear], Any]] = {
    "plain": lambda linear: linear,
    "fused": lambda linear: FusedLinear(linear.weight, linear.bias),
    "grouped": lambda linear: GroupedLinear(linear, rounded(linear.weight)),
}
if can_pack(torch.float32, torch.device("cpu")):
    KINDS["packed"] = lambda linear: PackedLinear(linear.weight, linear.bias)
if can_round():
    KINDS["int8"] = lambda linear: Int8Linear(linear.weight, linear.bias)


def deltas(seed: int, rank: int) -> list[Delta]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Delta(torch.randn(rank, IN, generator=generator), torch.randn(size, rank, generator=generator))
        for size in SIZES
    ]


def made(linear: Any) -> tuple[LoraLinear, list[list[Delta | None]], LoraStepState]:
    """Return a layer whose slot 0 has both parts, slot 1 one of them, and slot 2 none."""
    parts = [OutputSlice("one", 0, SIZES[0]), OutputSlice("two", SIZES[0], SIZES[1])]
    stack = LoraStack(parts, IN, SLOTS, RANK, torch.empty(0))
    held: list[list[Delta | None]] = [[*deltas(1, 4)], [None, deltas(2, 3)[1]], [None, None]]
    for slot, each in enumerate(held):
        stack.fill(slot, deltas(7, 4))  # the previous contents must be gone
        stack.fill(slot, each)
    step_state = LoraStepState(CallRows())
    return LoraLinear(linear, stack, step_state), held, step_state


def added(x: torch.Tensor, slots: list[int], held: list[list[Delta | None]]) -> torch.Tensor:
    """Return the deltas row by row in float64."""
    rows = []
    for row, slot in zip(x.double(), slots, strict=True):
        each: list[Delta | None] = [None, None] if slot < 0 else held[slot]
        parts = [
            torch.zeros(size, dtype=torch.float64) if delta is None else delta.b.double() @ (delta.a.double() @ row)
            for size, delta in zip(SIZES, each, strict=True)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [[0] * 5, [1, -1, 0, 2, 1], [2, 2, 2, 2, 2], [-1, 1, -1, 1, -1]], ids=str)
def test_each_row_uses_its_own_adapter(kind: str, slots: list[int]) -> None:
    lora, held, step_state = made(KINDS[kind](plain()))
    x, other = torch.randn(5, IN), torch.randn(5, OUT)
    used = [slot for slot in slots if slot >= 0]
    first, stop = min(used), max(used) + 1
    others = None if len(set(slots)) == 1 else torch.tensor(slots)[:, None] != torch.arange(first, stop)
    with torch.inference_mode():
        alone, alone_added = lora(x), lora.linear(x) + other
        step_state.slots = StepSlots(first, stop, others)
        wanted = added(x, slots, held)
        torch.testing.assert_close((lora(x) - alone).double(), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lora(x[None])[0], lora(x))
        torch.testing.assert_close((lora.forward_add(x, other) - alone_added).double(), wanted, rtol=1e-4, atol=1e-4)
        step_state.slots = None
        assert torch.equal(lora(x), alone)


def test_overflow_of_another_adapter_never_reaches_a_row() -> None:
    """Multiplying it by zero would give NaN."""
    lora, held, step_state = made(plain())
    lora.lora_stack.a[1].fill_(3e38)
    x = torch.randn(2, IN).abs()
    with torch.inference_mode():
        alone = lora(x)
        step_state.slots = StepSlots(0, 2, torch.tensor([[False, True], [True, True]]))
        found = lora(x)
    assert torch.equal(found[1], alone[1])
    assert bool(found.isfinite().all())
    assert held


def test_lora_slot_that_could_not_be_cleared_is_cleared_when_it_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora, _, step_state = made(plain())
    stack = lora.lora_stack

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            stack.fill(0, [None, None])
    stack.fill(0, [None, None])
    x = torch.randn(2, IN)
    with torch.inference_mode():
        alone = lora(x)
        step_state.slots = StepSlots(0, 1, None)
        assert torch.equal(lora(x), alone)
        assert not stack.a[0].any()


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([3, 0, 2])], ids=str)
def test_lora_layer_called_with_some_rows_of_the_batch_uses_the_adapters_of_those_rows(
    rows: slice | torch.Tensor,
) -> None:
    lora, _, step_state = made(plain())
    slots, x = torch.tensor([0, 1, -1, 0]), torch.randn(4, IN)
    step_state.slots = StepSlots(0, SLOTS, slots[:, None] != torch.arange(SLOTS))
    whole = lora(x)
    step_state.call_rows.rows = rows
    torch.testing.assert_close(lora(x[rows]), whole[rows])
