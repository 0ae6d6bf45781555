"""Copies of recurrent states between slots on the device and in host memory, in order."""

from __future__ import annotations

import random

import pytest
import torch

from kvscope_engine.model.kv_cache.state_storage import StatePart, StateStorage
from kvscope_engine.policy.state_slots import host_slots
from kvscope_kernels import ops_for
from kvscope_kernels.copy_rows import RowTensors
from kvscope_telemetry.errors import BadInput

LAYERS = (
    (StatePart("conv", 0, (6, 4), torch.bfloat16), StatePart("recurrent", 0, (2, 8, 8), torch.float32)),
    (StatePart("conv", 0, (3,), torch.bfloat16), StatePart("recurrent", 0, (5,), torch.float32)),
)
NUM_SLOTS, NUM_BELOW = 5, 4


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("shortages", [0.0, 0.5])
def test_state_copies_are_made_in_order(kind: str, shortages: float, seed: int) -> None:
    """Includes runs in which memory for the copies is often missing."""
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    storage = StateStorage(NUM_SLOTS, LAYERS, torch.device(kind), NUM_BELOW)
    assert storage.copy_seconds > 0
    assert storage.host_bytes == NUM_BELOW * storage.slot_bytes
    chance = random.Random(seed)

    def copy_rows(rows: RowTensors, pairs: torch.Tensor) -> None:
        if chance.random() < shortages:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ops_for(kind).copy_rows(rows, pairs)

    held: list[int | None] = [*range(NUM_SLOTS), *[None] * NUM_BELOW]
    for tensor in storage.slot_tensors:
        tensor.copy_(torch.arange(NUM_SLOTS)[:, None].expand_as(tensor))
    for _ in range(20):
        pairs: list[tuple[int, int]] = []
        for _ in range(chance.randint(0, 8)):
            source, target = chance.sample([slot for slot, content in enumerate(held) if content is not None], 2)
            if chance.random() < 0.4:
                target = chance.randrange(NUM_SLOTS, NUM_SLOTS + NUM_BELOW)
            if source != target and min(source, target) < NUM_SLOTS:
                pairs.append((source, target))
                held[target] = held[source]
        storage.copy(pairs, copy_rows)
        for tensor in storage.slot_tensors:
            found = tensor.float().cpu()
            assert (found == torch.tensor(held[:NUM_SLOTS], dtype=torch.float32)[:, None]).all()
    storage.close()


def test_host_memory_beyond_what_is_free_is_refused() -> None:
    with pytest.raises(BadInput, match="--kv-host-memory asks for"):
        StateStorage(2, LAYERS, torch.device("cpu"), 1 << 40)


def test_states_get_at_most_half_of_host_memory() -> None:
    assert host_slots(1000, 10, 100, 20) == 5
    assert host_slots(1000, 10, 100, 3) == 3
    assert host_slots(1000, 0, 100, 20) == 10, "blocks need no host memory"
    assert host_slots(0, 10, 100, 20) == 0
