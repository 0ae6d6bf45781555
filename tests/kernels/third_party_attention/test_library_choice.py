"""An installed library that fits, gives the same result and is faster runs prefill; a line explains the choice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels.dispatch import PrefillAttention, torch_ops
from kvscope_kernels.third_party_attention import library_choice as choice
from kvscope_kernels.third_party_attention.library import AttentionShape
from kvscope_kernels.third_party_attention.library_choice import Unusable, choose, installed
from kvscope_kernels.third_party_attention.prefill_with_fallback import PLAIN, PrefillWithFallback

SHAPE = AttentionShape(4, 2, 64, 16, torch.bfloat16, 90)
CPU = torch.device("cpu")


def fake_clock(**seconds: float) -> Callable[[Any], float]:
    """Return a clock with times by the first letters of the library; kvscope's kernels take 1."""

    def of(call: Any) -> float:
        ran: PrefillAttention = call.args[0].prefill
        if not isinstance(ran, PrefillWithFallback):
            return 1.0
        return next(value for name, value in seconds.items() if ran.library.name.startswith(name))

    return of


def choose_library(wanted: str, timed: Callable[[Any], float]) -> choice.LibraryChoice:
    return choose(torch_ops(), SHAPE, CPU, wanted, [PLAIN], timed)


@pytest.fixture
def one_small_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure only one small case."""
    works = choice.workloads_of
    monkeypatch.setattr(choice, "workloads_of", lambda shape: works(shape)[1:])


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn", "flash_attn_interface", "flash_attn_3"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_own_kernels_are_chosen_if_nothing_is_installed(nothing_installed: None) -> None:
    found = choose_library("auto", fake_clock())
    assert found.ops is not None
    assert not isinstance(found.ops.prefill, PrefillWithFallback)
    assert found.description == (
        "attention: kvscope's own kernels"
        " (FlashInfer: not installed; flash-attn 3: not installed; flash-attn 2: not installed)"
    )
    with pytest.raises(Unusable, match=r"^FlashInfer: not installed$"):
        choose_library("flashinfer", fake_clock())
    assert set(installed().values()) == {"not installed"}


def test_fastest_library_is_chosen(fake_libraries: Any, one_small_workload: None) -> None:
    found = choose_library("auto", fake_clock(FlashInfer=0.8, flash=0.7))
    assert isinstance(found.ops.prefill, PrefillWithFallback)
    assert found.ops.prefill.library.name == "flash-attn 3"
    assert found.description == (
        "attention: flash-attn 3 for prompts (flash-attn 2: takes blocks of multiples of 256 tokens, not of 16;"
        " FlashInfer: 0.80 of our time; flash-attn 3: 0.70 of our time)"
    )
    assert choose_library("kvscope", fake_clock()).description == "attention: kvscope's own kernels"
    heard: list[str] = []
    choose(torch_ops(), SHAPE, CPU, "flashinfer", [PLAIN], fake_clock(FlashInfer=0.8), heard.append)
    assert heard == ["trying FlashInfer, whose kernels are compiled when they are first used"]
    slower = choose_library("auto", fake_clock(FlashInfer=0.98, flash=1.2))
    assert not isinstance(slower.ops.prefill, PrefillWithFallback), "a gain of 2 % is timing's own noise"
    asked = choose_library("flashinfer", fake_clock(FlashInfer=1.5))
    assert isinstance(asked.ops.prefill, PrefillWithFallback)
    assert asked.description == "attention: FlashInfer for prompts, as asked for, 1.50 of our time"


def test_failing_or_wrong_library_is_not_chosen(fake_libraries: Any, one_small_workload: None) -> None:
    fake_libraries.modules["flash_attn_interface"].flash_attn_with_kvcache = lambda q, *_, **__: torch.zeros_like(q)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    fake_libraries.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper = broken
    found = choose_library("auto", fake_clock(flash=0.1))
    assert not isinstance(found.ops.prefill, PrefillWithFallback)
    assert "flash-attn 3: its results differ from those of our kernels" in found.description
    assert "FlashInfer: RuntimeError: no kernel image is available" in found.description
