"""Products of few rows on a GPU without measurements: timed at the start, then the faster one is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.engine.gpu_notes import faults_in
from tests.engine.rehearsal.steps.plans import decodes

from kvscope_engine.model.runner.product_choice import choose_matmul_kernels
from kvscope_kernels.linear import choice
from kvscope_kernels.linear.skinny_linear import linear


def clock(calls: Sequence[Any]) -> Callable[[], float]:
    """Return a clock by which the kernels are faster for a single row only."""
    rows = len(calls[0].args[0])
    return lambda: (0.5 if rows == 1 else 2.0) if calls[0].func is linear else 1.0


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_faster_matrix_product_is_chosen_for_each_number_of_rows(
    capability: int, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10))
    monkeypatch.setattr(choice, "_is_close", lambda *_: True)  # there are no numbers to compare
    heard: list[str] = []
    said: list[str] = []
    runner = fake_gpu.make_runner(
        enforce_eager=True, joined=lambda module: said.append(choose_matmul_kernels(module, heard.append, clock))
    )
    assert said[0].startswith("products of one row and of 2 to 16, our kernels' time over cuBLAS's: ")
    assert faults_in(said) == [], "a start notes it"
    assert "1024 x 256 0.50 and 2.00" in said[0], "both halves of an MLP's first product at once"
    assert "timing products with 1,024 x 256 weights" in heard
    assert len(heard) == 5, "each shape once: q, k, v; o; the MLP's two; the head"
    runner.warm_up(lambda _: None)
    known = set(fake_gpu.seen.compiled)
    launched = []
    for count in (1, 3):
        fake_gpu.seen.clear()
        runner.run(decodes(count))
        launched.append(fake_gpu.seen.launches["skinny_linear"])
    assert launched == [9, 0], "four products per layer and the head"
    assert fake_gpu.seen.compiled == known


def test_nothing_is_timed_on_a_measured_gpu(fake_gpu: Any) -> None:
    said: list[str] = []
    fake_gpu.make_runner(joined=lambda module: said.append(choose_matmul_kernels(module, said.append, clock)))
    assert said == [""]
