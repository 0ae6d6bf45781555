"""Choice of device and dtype on machines of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvscope_engine.model.platforms import device as device_module
from kvscope_engine.model.platforms.device import (
    choose_device,
    choose_dtype,
    device_notes,
    dtype_name,
    free_bytes,
    gpu_uuids,
)
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.devices import Gpu

CPU = torch.device("cpu")


class FakeGpus:
    """Stand-in for `Gpus` with the given GPUs."""

    def __init__(self, *names: str) -> None:
        self._gpus = tuple(Gpu(index=index, name=name) for index, name in enumerate(names))

    def sample(self) -> tuple[Gpu, ...]:
        return self._gpus


@pytest.fixture
def has_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def capability(*of: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: of)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cards = [SimpleNamespace(name="Tesla T4", uuid="aaaa"), SimpleNamespace(name="Tesla T4", uuid="bbbb")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    capability(8, 9)
    return capability


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("has_cuda")
@pytest.mark.parametrize(("name", "kind"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_cuda_is_chosen_on_a_machine_with_a_gpu_unless_cpu_is_requested(name: str, kind: str) -> None:
    assert choose_device(name).type == kind


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_gpu_with_a_low_compute_capability_is_refused_in_one_line(has_cuda: Callable[..., None], name: str) -> None:
    has_cuda(7, 5)
    with pytest.raises(BadInput) as refused:
        choose_device(name)
    assert str(refused.value) == (
        f"device={name!r} is not accepted: Tesla T4 has compute capability 7.5, and at least 8.0 is needed;"
        " --device cpu runs on the CPU"
    )
    assert choose_device("cpu") == CPU
    has_cuda(8, 0)
    assert choose_device(name).type == "cuda"


def test_gpus_and_mig_instances_are_identified_by_uuid(
    has_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert gpu_uuids(2) == ("aaaa", "bbbb"), "UUIDs must be those of CUDA"
    instance = "c7384736-a75d-5afc-978f-d2f1294409fd"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"MIG-{instance}")
    assert gpu_uuids(1) == (instance,)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="of an old torch"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_uuids(1) == ()


@pytest.mark.usefixtures("no_cuda")
def test_too_old_driver_is_reported_and_not_silently_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update it\nby")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    (note,) = device_notes("auto", CPU, FakeGpus("NVIDIA GeForce RTX 4090"))
    assert note == (
        "running on the CPU: NVIDIA GeForce RTX 4090 cannot be used: The NVIDIA driver on your system is too old"
        " (found version 12020); CUDA 13.0 of this torch needs an NVIDIA driver 580 or newer"
        " (--device cpu if this is intended)"
    )
    assert device_notes("cpu", CPU, FakeGpus("NVIDIA GeForce RTX 4090")) == [], "it was asked for"
    assert device_notes("auto", CPU, FakeGpus()) == [], "there is none"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in device_notes("auto", CPU, FakeGpus("NVIDIA L4"))[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_notes("auto", CPU, FakeGpus("NVIDIA L4")) == [], "a hidden GPU must not be reported"


@pytest.mark.usefixtures("no_cuda")
def test_cpu_is_chosen_on_a_machine_without_a_gpu_and_cuda_is_refused() -> None:
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
def test_cpu_uses_bfloat16_if_it_multiplies_it(monkeypatch: pytest.MonkeyPatch, flags: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(device_module, "lines_of", lambda path: ["model name: x", f"flags\t\t: {flags}"])
    assert choose_dtype("auto", CPU) is dtype
    assert choose_dtype("float32", CPU) is torch.float32
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_gpu_uses_bfloat16_if_supported(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_dtype("auto", torch.device("cuda")) is dtype


def test_free_memory_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes(CPU) <= total
    monkeypatch.setattr(device_module, "lines_of", lambda path: [])
    assert free_bytes(CPU) > 1 << 50


def test_dtype_name_of_torch_bfloat16_is_bfloat16() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
