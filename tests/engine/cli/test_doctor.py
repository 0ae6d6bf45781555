"""`doctor` reports what is present and missing, and never crashes."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine.cli import machine_checks
from kvscope_engine.model.device_memory import paging
from kvscope_engine.model.layers.fused.int8_linear import can_round
from kvscope_engine.model.platforms import device
from kvscope_engine.model.runner import operation_table
from kvscope_telemetry.messages.devices import Gpu, GpuProcess

Run = Callable[..., tuple[int, str, str]]
NEEDED = {"Python", "memory", "torch", "cache folder", *machine_checks.ENGINE_PACKAGES}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    can_round()  # cached per process: evaluate it before a test breaks something
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))


def test_doctor_reports_that_the_engine_can_run(run: Run) -> None:
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["can_run"] is True
    assert {check["name"] for check in report["checks"] if check["needed"]} == NEEDED
    names = {check["name"] for check in report["checks"]}
    assert names >= {"GPU", "Triton", "attention", "Qt", "Qt libraries", "display", "default model", "weights"}
    text = run("doctor")[1]
    assert all(name in text for name in names)
    assert text.endswith("The engine can run here.\n")


def test_operations_are_printed_as_a_table(run: Run) -> None:
    text = run("doctor")[1]
    _, table = text.split("\nOperations on ")
    title, header, *rows = table.partition("\n\n")[0].splitlines()
    assert header.split() == ["operation", "implementation", "reason"]
    column = header.index("implementation")
    assert "decode attention" in {row[:column].strip() for row in rows}
    assert all(row[column - 2 : column] == "  " and row[column] != " " for row in rows)
    assert "KV cache" in title


def test_failing_operation_table_does_not_hide_the_checks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("the GPU kernels need Triton,\nwhich is not installed")

    monkeypatch.setattr(operation_table, "machine_table", fail)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "Operations cannot be listed: the GPU kernels need Triton, which is not installed\n" in out
    assert out.endswith("The engine can run here.\n")
    operations = json.loads(run("doctor", "--json")[1])["operations"]
    assert operations["rows"] == []


@pytest.mark.parametrize("error", [ImportError("No module named 'torch'"), OSError("libc10.so: broken")])
def test_missing_torch_is_reported_with_the_fix(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if name == "torch":
            raise error
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    code, out, _ = run("doctor")
    assert code == 1
    assert f"MISSING torch           cannot be used: {error}" in out
    assert "mend it: pip install 'kvscope[engine]'" in out
    assert "The engine cannot run here." in out


def test_missing_qt_libraries_are_named_with_their_packages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        if name in ("libEGL.so.1", "libxcb-cursor.so.0"):
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    code, out, _ = run("doctor")
    assert code == 0, "the engine does not need them"
    assert "missing libEGL.so.1, libxcb-cursor.so.0" in out
    assert "mend it: sudo apt-get install libegl1 libxcb-cursor0" in out


def test_missing_display_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert "neither DISPLAY nor WAYLAND_DISPLAY" in run("doctor")[1]
    monkeypatch.setenv("DISPLAY", ":7")
    assert "display         :7" in run("doctor")[1]


@pytest.mark.parametrize(
    ("returncode", "stdout", "expected"),
    [
        (0, "NVIDIA H200, 570.1, 143771 MiB\n", "NVIDIA H200, 570.1, 143771 MiB"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate\n", "nvidia-smi fails"),
        (0, "", "nvidia-smi fails"),
    ],
)
def test_gpu_is_reported_from_nvidia_smi(
    run: Run, monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str, expected: str
) -> None:
    answer = subprocess.CompletedProcess(["nvidia-smi"], returncode, stdout, "")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: answer)
    code, out, _ = run("doctor")
    assert code == 0
    assert expected in out


def test_hanging_driver_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*words: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", hang)
    code, out, _ = run("doctor")
    assert code == 0
    assert "cannot be looked at" in out


def test_unusable_cache_folder_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    code, out, _ = run("doctor")
    assert code == 1
    assert "KVSCOPE_CACHE" in out


def test_doctor_reports_even_if_nothing_is_readable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: Any, **options: Any) -> Any:
        raise PermissionError("not for you")

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", broken)
        patch.setattr(shutil, "disk_usage", broken)
        patch.setattr(shutil, "which", broken)
        checks = machine_checks.check_machine()
    assert len(checks) == 15 + len(machine_checks.ENGINE_PACKAGES) - 1


def test_doctor_reports_an_unreadable_client_allow_list(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    code, out, _ = run("doctor", "--json")
    (check,) = [check for check in json.loads(out)["checks"] if check["name"] == "allow-list"]
    assert check["ok"]
    assert not (tmp_path / "config").exists(), "looking makes nothing"
    run("keys", "new", "laptop", "--out", str(tmp_path / "laptop.key"))
    (tmp_path / "config" / "kvscope" / "keys" / "clients.toml").write_text("[[")
    code, out, _ = run("doctor")
    assert code == 0, "the engine can run without clients on tcp"
    assert "no client is let in over tcp: allow-list" in out
    assert "mend it: fix the file" in out


def test_keys_list_creates_no_files(run: Run, tmp_path: Path) -> None:
    code, out, err = run("keys", "list", "--keys", str(tmp_path / "keys"), "--json")
    assert (code, json.loads(out), err) == (0, [], "")
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(("is_available", "why"), [(True, "compute capability 7.5"), (False, "cannot be used")])
def test_unusable_gpu_fails_its_check_with_advice(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_available: bool, why: str
) -> None:
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = Gpu(index=0, name="Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    monkeypatch.setattr(device, "Gpus", lambda: SimpleNamespace(sample=lambda: (card,)))
    code, out, _ = run("doctor", "--json")
    (check,) = [check for check in json.loads(out)["checks"] if check["name"] == "torch"]
    assert not check["ok"]
    assert "Tesla T4" in check["detail"]
    assert why in check["detail"]
    assert "--device cpu" in check["mend"]
    assert code == 0, "the engine runs on the CPU"


@pytest.mark.parametrize("wsl", [False, True])
def test_gpu_memory_holders_and_displays_are_reported(run: Run, monkeypatch: pytest.MonkeyPatch, wsl: bool) -> None:
    gib = 1 << 30
    desktop = Gpu(
        index=0,
        name="NVIDIA GeForce RTX 4070",
        memory_total_bytes=12 * gib,
        memory_free_bytes=9 * gib,
        display_active=True,
        processes=(GpuProcess(pid=1 << 22, name="browser", used_bytes=2 * gib),),
    )
    instance = Gpu(index=1, name="NVIDIA H100 MIG 1g.10gb", memory_total_bytes=10 * gib, memory_free_bytes=10 * gib)
    asked: list[list[str]] = []

    def gpus(used: list[str]) -> Any:
        asked.append(used)
        return SimpleNamespace(sample=lambda: (desktop, instance, Gpu(index=2, name="gone", fault="GPU is lost")))

    monkeypatch.setattr(machine_checks, "Gpus", gpus)
    monkeypatch.setattr(paging, "is_wsl", lambda: wsl)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa, 0")
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json")[1])["checks"]}
    told = checks["GPU memory"]
    assert told["ok"]
    assert told["detail"].startswith(
        "NVIDIA GeForce RTX 4070: 9.0 of 12.0 GiB free, drives a display, for which 1.0 GiB stays free, held by browser"
        f" 2.0 GiB (pid {1 << 22}); NVIDIA H100 MIG 1g.10gb: 10.0 of 10.0 GiB free"
    )
    assert ("Sysmem Fallback" in told["detail"]) == wsl
    assert asked == [["MIG-aaaa"]]


def test_gpu_memory_is_not_reported_without_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "Gpus", lambda used: SimpleNamespace(sample=lambda: ()))
    assert "-       GPU memory      no GPU reports its memory" in run("doctor")[1]
