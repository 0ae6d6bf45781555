"""Results on their way down: the right numbers, whichever step they are of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_engine.model.device_memory import step_buffer
from kvscope_engine.model.device_memory.read_back import VectorReadBack


def test_on_a_cpu_they_are_there() -> None:
    landing = VectorReadBack(torch.device("cpu"), 4).start(torch.tensor([3, 1]))
    assert landing.wait() == [3, 1]


class Moment:
    """An event that is past once somebody waited."""

    waited = 0

    def record(self) -> None: ...

    def synchronize(self) -> None:
        Moment.waited += 1


@pytest.fixture
def down(monkeypatch: pytest.MonkeyPatch) -> VectorReadBack:
    """As on a GPU, with the host's own memory for the device's."""

    def memory(num_bytes: int) -> tuple[torch.Tensor, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        return tensor, tensor.numpy()

    monkeypatch.setattr(step_buffer, "pinned_bytes", memory)
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(Moment, "waited", 0)
    return VectorReadBack(torch.device("cuda"), 4)


def test_two_steps_come_down_side_by_side(down: VectorReadBack) -> None:
    first = down.start(torch.tensor([1, 2, 3]))
    second = down.start(torch.tensor([0.5, -1.0], dtype=torch.float64))
    assert Moment.waited == 0
    assert first.wait() == [1, 2, 3]
    third = down.start(torch.tensor([7]))
    assert second.wait() == [0.5, -1.0]
    assert third.wait() == [7]
    assert Moment.waited == 3


def test_more_numbers_than_were_thought_of_have_room(down: VectorReadBack) -> None:
    first = down.start(torch.arange(9))
    assert down.start(torch.arange(100)).wait() == list(range(100))
    assert first.wait() == list(range(9))
