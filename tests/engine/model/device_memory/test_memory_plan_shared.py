"""Memory plan of a GPU that is used by others: the desktop and other engines keep their memory, and the holders are
named.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_engine.model.device_memory.memory_plan import DESKTOP_BYTES, MemoryPlan, StepReserves, check_weights_fit
from kvscope_engine.model.device_memory.shortage_report import start_remedy
from kvscope_telemetry.errors import KvscopeError

GIB = 1 << 30


def plan(**given: Any) -> MemoryPlan:
    """Return a plan for a GPU of 8 GiB, of which others hold one."""
    sizes = {"weights": 3 * GIB, "activations": GIB // 2, "logits": 0, "staging": 0, "kv_min": 1 << 20}
    options = {"total": 8 * GIB, "utilization": 0.9, "others": GIB, "reserves": StepReserves()}
    return MemoryPlan(**{**sizes, **options, **given})


def test_kv_cache_is_reduced_by_the_desktop_reserve_if_the_gpu_drives_a_display() -> None:
    alone, shared = plan(), plan(draws_display=True)
    assert shared.allowed == 8 * GIB - DESKTOP_BYTES
    assert alone.kv - shared.kv == alone.allowed - shared.allowed > 0
    assert shared.desktop == DESKTOP_BYTES
    assert alone.desktop == 0
    assert "1.0 GiB kept for the desktop that it draws" in shared.summary("cuda:0")
    assert "desktop" not in alone.summary("cuda:0")


def test_kv_cache_is_not_reduced_for_the_desktop_if_enough_gpu_memory_stays_free() -> None:
    for given in ({"utilization": 0.5}, {"total": 24 * GIB}):
        assert plan(draws_display=True, **given).kv == plan(**given).kv
        shared = plan(draws_display=True, **given)
        assert shared.desktop == shared.total - shared.allowed > DESKTOP_BYTES


def test_memory_holders_are_named_if_the_plan_does_not_fit() -> None:
    who = "another kvscope engine 4.0 GiB (pid 12), firefox 0.9 GiB (pid 7)"
    with pytest.raises(KvscopeError) as refused:
        plan(others=5 * GIB, draws_display=True).check("it", "cuda:0", lambda: (who, int(4.9 * GIB)))
    assert f"others hold 5.0 GiB: {who}): end one of these" in str(refused.value)
    assert "1.0 GiB kept for the desktop" in str(refused.value)
    with pytest.raises(KvscopeError, match=r"others hold 5\.0 GiB: Xorg\): (free some|a GPU of)"):
        plan(others=5 * GIB).check("it", "cuda:0", lambda: ("Xorg", 30 << 20))
    with pytest.raises(KvscopeError, match=r"others hold 5\.0 GiB\): "):
        plan(others=5 * GIB).check("it", "cuda:0")
    with pytest.raises(KvscopeError, match=r"of the GPU may be used beside firefox: a step"):
        check_weights_fit("it", 8_000_000_000, 2, 5 * GIB, 24 * GIB, "the GPU", None, lambda: "firefox")
    assert "end other programs on the GPU (firefox), or give" in start_remedy("firefox", on_gpu=True)


def test_memory_holders_are_not_queried_if_the_plan_fits() -> None:
    def fail() -> Any:
        raise AssertionError

    plan().check("it", "cuda:0", fail)
    check_weights_fit("it", 1_000_000_000, 2, 5 * GIB, 24 * GIB, "the GPU", None, fail)
