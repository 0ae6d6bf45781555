"""Weights that stay on the host, rehearsed where the device is the host too: a second stream whose copies come late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.model.cpu_offload import streaming
from kvscope_engine.model.cpu_offload.split import large_bytes
from kvscope_engine.model.device_memory.device_streams import Lane, StreamMark
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader import model_loader
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.verification import fuse
from kvscope_telemetry.engine_config import EngineConfig


class CopyMark:
    """Behind so many copies."""

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies

    def has_passed(self) -> bool:
        raise AssertionError("nobody asks")

    def seconds_since(self, earlier: StreamMark) -> float:
        raise AssertionError("nobody asks")


class LateCopies:
    """What computes runs at once; a copy is done when somebody waits for it, and never before what it overwrites."""

    made: list[LateCopies]

    def __init__(self, *_: Any) -> None:
        self.copies: list[Callable[[], None]] = []
        self.num_done = 0
        self._last: StreamMark | None = None
        self._awaited: StreamMark | None = None
        self.made.append(self)

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        assert lane == "copy"
        assert self._awaited is self._last, "it may overwrite what is still read"
        self.copies.append(work)

    def mark(self, lane: Lane) -> StreamMark:
        mark = CopyMark(len(self.copies))
        if lane == "compute":
            self._last = mark
        return mark

    def wait(self, lane: Lane, mark: StreamMark) -> None:
        if lane == "copy":
            self._awaited = mark
            return
        assert isinstance(mark, CopyMark)
        self._do(mark.num_copies)

    def finish(self, lane: Lane) -> None:
        self._do(len(self.copies))

    def _do(self, num_copies: int) -> None:
        while self.num_done < num_copies:
            self.copies[self.num_done]()
            self.num_done += 1


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> type[LateCopies]:
    """In place of CUDA's streams; `made` are those of this test. Linear layers are as on a GPU, not packed."""
    LateCopies.made = []
    monkeypatch.setattr(streaming, "CudaStreams", LateCopies)
    monkeypatch.setattr(model_loader, "check_streaming", lambda *_: None)
    monkeypatch.setattr(fuse, "can_pack", lambda *_: False)
    return LateCopies


@pytest.fixture
def load_on_host(
    tiny_loaded: Callable[..., LoadedModel], late_copies: type[LateCopies], tmp_path: Path
) -> Callable[..., tuple[LoadedModel, LoadedModel]]:
    """A tiny model twice: whole, and with the weights of its last `num_layers` layers on the host."""

    def load(model_type: str, num_layers: int, **changes: Any) -> Any:
        whole = tiny_loaded(model_type, **changes)
        layers: Any = whole.module.get_submodule("model.layers")
        config = EngineConfig(
            model=f"dummy:{tmp_path / model_type}.json",
            device="auto",
            dtype="float32",
            cpu_offload_gb=(num_layers - 0.5) * large_bytes(layers[-1]) / (1 << 30),
        )
        return whole, load_model(config, lambda _: None)

    return load
