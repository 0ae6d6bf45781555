"""Reading results back from the device: the right numbers, whichever step they belong to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_engine.model.device_memory import step_buffer
from kvscope_engine.model.device_memory.read_back import VectorReadBack


def test_results_on_a_cpu_are_available_immediately() -> None:
    landing = VectorReadBack(torch.device("cpu"), 4).start(torch.tensor([3, 1]))
    assert landing.wait() == [3, 1]


class FakeEvent:
    """Event that is complete after a wait."""

    waited = 0

    def record(self) -> None: ...

    def synchronize(self) -> None:
        FakeEvent.waited += 1


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> VectorReadBack:
    """ReadBack as on a GPU, with host memory in place of device memory."""

    def memory(num_bytes: int) -> tuple[torch.Tensor, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        return tensor, tensor.numpy()

    monkeypatch.setattr(step_buffer, "pinned_bytes", memory)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "waited", 0)
    return VectorReadBack(torch.device("cuda"), 4)


def test_results_of_two_steps_are_read_back_concurrently(read_back: VectorReadBack) -> None:
    first = read_back.start(torch.tensor([1, 2, 3]))
    second = read_back.start(torch.tensor([0.5, -1.0], dtype=torch.float64))
    assert FakeEvent.waited == 0
    assert first.wait() == [1, 2, 3]
    third = read_back.start(torch.tensor([7]))
    assert second.wait() == [0.5, -1.0]
    assert third.wait() == [7]
    assert FakeEvent.waited == 3


def test_results_larger_than_the_buffer_are_read_back(read_back: VectorReadBack) -> None:
    first = read_back.start(torch.arange(9))
    assert read_back.start(torch.arange(100)).wait() == list(range(100))
    assert first.wait() == list(range(9))
