"""Identity of a model, under which the results of its checks are stored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvscope_engine import program_identity
from kvscope_engine.model.loader.model_identity import SAMPLE_BYTES, model_identity
from kvscope_kernels.cpu.library import library


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(40 * SAMPLE_BYTES))
    return path


def identity_of(
    weights: Path, dtype: torch.dtype = torch.float32, quantization: str = "none", num_threads: int = 1
) -> str:
    return model_identity([weights], dtype, quantization, num_threads)


def changed_in_place(path: Path) -> None:
    """Change a byte of a file between two samples, and restore its time."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(SAMPLE_BYTES * 3 // 2)
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced_by_a_copy(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


@pytest.mark.parametrize("change", [changed_in_place, replaced_by_a_copy, lambda path: os.utime(path, ns=(1, 1))])
def test_identity_changes_with_a_file(weights: Path, change: Callable[[Path], None]) -> None:
    before = identity_of(weights)
    assert identity_of(weights) == before
    change(weights)
    assert identity_of(weights) != before


def test_identity_changes_with_options_threads_and_variables(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = {identity_of(weights), identity_of(weights, torch.bfloat16)}
    identities |= {identity_of(weights, quantization="int8"), identity_of(weights, num_threads=2)}
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    identities.add(identity_of(weights))
    monkeypatch.setattr("kvscope_engine.model.loader.model_identity.library", lambda: None)
    identities.add(identity_of(weights))
    monkeypatch.setattr("kvscope_engine.model.loader.model_identity.cpu_flags", lambda: frozenset(("other",)))
    identities.add(identity_of(weights))
    assert len(identities) == (6 if library() is None else 7)


def test_changed_source_file_changes_the_programs_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kvscope_sample"
    (package / "cpu").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    source = package / "cpu" / "kernel.c"
    source.write_text("1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(program_identity, "_PACKAGES", ("kvscope_sample",))
    before, times = program_identity.program_identity(), source.stat()
    source.write_text("2")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert program_identity.program_identity() != before
