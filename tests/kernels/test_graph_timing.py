"""Calls are captured in a CUDA graph, tested with fakes for torch's streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_kernels.graph_timing import capture


def test_failed_capture_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own context does not if the end of the capture fails as well."""
    usual = SimpleNamespace(wait_stream=lambda _: None)
    streams = [usual]

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        before = streams[-1]
        streams.append(entered)
        try:
            yield
        finally:
            streams.append(before)

    @contextmanager
    def graph(_: object) -> Iterator[None]:
        streams.append(SimpleNamespace())
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    for name, stand_in in {
        "CUDAGraph": object,
        "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "current_stream": lambda: streams[-1],
        "synchronize": lambda: None,
        "stream": stream,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="during capture"):
        capture([lambda: None])
    assert streams[-1] is usual
