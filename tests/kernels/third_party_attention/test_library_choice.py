"""What is installed, fits, computes the same and is faster runs prompts; the line says why, and why not."""

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
from kvscope_kernels.third_party_attention.preferred import PLAIN, PreferredPrefill

SHAPE = AttentionShape(4, 2, 64, 16, torch.bfloat16, 90)
CPU = torch.device("cpu")


def clock(**seconds: float) -> Callable[[Any], float]:
    """By the first letters of the library that runs; ours takes 1."""

    def of(call: Any) -> float:
        ran: PrefillAttention = call.args[0].prefill
        if not isinstance(ran, PreferredPrefill):
            return 1.0
        return next(value for name, value in seconds.items() if ran.library.name.startswith(name))

    return of


def chosen(wanted: str, timed: Callable[[Any], float]) -> choice.LibraryChoice:
    return choose(torch_ops(), SHAPE, CPU, wanted, [PLAIN], timed)


@pytest.fixture
def short_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case."""
    works = choice.workloads_of
    monkeypatch.setattr(choice, "workloads_of", lambda shape: works(shape)[1:])


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn", "flash_attn_interface", "flash_attn_3"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_ours_where_nothing_is_installed(nothing_installed: None) -> None:
    found = chosen("auto", clock())
    assert found.ops is not None
    assert not isinstance(found.ops.prefill, PreferredPrefill)
    assert found.description == (
        "attention: kvscope's own kernels"
        " (FlashInfer: not installed; flash-attn 3: not installed; flash-attn 2: not installed)"
    )
    with pytest.raises(Unusable, match=r"^FlashInfer: not installed$"):
        chosen("flashinfer", clock())
    assert set(installed().values()) == {"not installed"}


def test_the_fastest_is_taken(stand_ins: Any, short_works: None) -> None:
    found = chosen("auto", clock(FlashInfer=0.8, flash=0.7))
    assert isinstance(found.ops.prefill, PreferredPrefill)
    assert found.ops.prefill.library.name == "flash-attn 3"
    assert found.description == (
        "attention: flash-attn 3 for prompts (flash-attn 2: takes blocks of multiples of 256 tokens, not of 16;"
        " FlashInfer: 0.80 of our time; flash-attn 3: 0.70 of our time)"
    )
    assert chosen("kvscope", clock()).description == "attention: kvscope's own kernels"
    heard: list[str] = []
    choose(torch_ops(), SHAPE, CPU, "flashinfer", [PLAIN], clock(FlashInfer=0.8), heard.append)
    assert heard == ["trying FlashInfer, whose kernels are compiled when they are first used"]
    slower = chosen("auto", clock(FlashInfer=0.98, flash=1.2))
    assert not isinstance(slower.ops.prefill, PreferredPrefill), "a gain of 2 % is timing's own noise"
    asked = chosen("flashinfer", clock(FlashInfer=1.5))
    assert isinstance(asked.ops.prefill, PreferredPrefill)
    assert asked.description == "attention: FlashInfer for prompts, as asked for, 1.50 of our time"


def test_one_that_computes_something_else_or_fails_is_not_taken(stand_ins: Any, short_works: None) -> None:
    stand_ins.modules["flash_attn_interface"].flash_attn_with_kvcache = lambda q, *_, **__: torch.zeros_like(q)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    stand_ins.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper = broken
    found = chosen("auto", clock(flash=0.1))
    assert not isinstance(found.ops.prefill, PreferredPrefill)
    assert "flash-attn 3: computes something else than our kernels" in found.description
    assert "FlashInfer: RuntimeError: no kernel image is available" in found.description
