"""Capturing calls in a CUDA graph, with stand-ins for torch's streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_kernels.graph_timing import capture


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own context does not, where the end of the capture fails as well."""
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
