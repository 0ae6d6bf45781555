"""Time device work by replaying a CUDA graph of it."""

from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All of them, one after the other. Raises what CUDA raises where one waits for the device."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and loads kernels, which a capture must not
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # `graph` does not leave its stream where its end fails.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Two replays, the second one timed: the clocks are up, and L2 holds the end of the cycle, not its start."""
    start, end = _event(), _event()
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
