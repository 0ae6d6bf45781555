"""Measures the time of device work by replaying it as a CUDA graph."""

from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture all calls, in sequence. Raises CUDA's error if a call synchronizes with the device."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and load kernels before the capture
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # `torch.cuda.graph` does not restore the stream if ending the capture fails.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Replay the graph twice and return the seconds of the second replay. By then, the GPU's clocks have risen,
    and its L2 cache contains data from the end of the first replay.
    """
    start, end = _event(), _event()
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
