"""Which device and which numbers, on machines of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvscope_engine.model.loading import device as device_module
from kvscope_engine.model.loading.device import choose_device, choose_dtype, dtype_name, free_bytes
from kvscope_telemetry.errors import BadInput

CPU = torch.device("cpu")


@pytest.fixture
def has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("has_cuda")
@pytest.mark.parametrize(("name", "kind"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_with_a_gpu(name: str, kind: str) -> None:
    assert choose_device(name).type == kind


@pytest.mark.usefixtures("no_cuda")
def test_without_a_gpu() -> None:
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(BadInput, match="device='cuda'"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx512f avx512_bf16", torch.bfloat16),
        ("fpu amx_bf16", torch.bfloat16),
        ("fpu avx2", torch.float32),
        ("fpu not_avx512_bf16", torch.float32),
    ],
)
def test_a_cpu_takes_what_it_multiplies(monkeypatch: pytest.MonkeyPatch, flags: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(device_module, "_lines", lambda path: ["model name: x", f"flags\t\t: {flags}"])
    assert choose_dtype("auto", CPU) is dtype
    assert choose_dtype("float32", CPU) is torch.float32
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_takes_bfloat16_if_it_has_it(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_dtype("auto", torch.device("cuda")) is dtype


def test_free_memory_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes(CPU) <= total
    monkeypatch.setattr(device_module, "_lines", lambda path: [])
    assert free_bytes(CPU) > 1 << 50


def test_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
