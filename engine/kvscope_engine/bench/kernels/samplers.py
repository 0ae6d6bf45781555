"""How one contender is timed: by replays of a CUDA graph, or by the host's clock."""

import time
from functools import partial
from typing import Final

import torch

from kvscope_engine.bench.kernels.contest import CallCycle, Sampler
from kvscope_kernels.graph_timing import capture, replay_s
from kvscope_kernels.stream_read import stream_read, sums_for

_LEAST_S = 2e-3
"""A sample takes this long at least, so that the clock's own steps are nothing beside it."""
_READ_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}


def sampler_on(device: str, contender: CallCycle) -> Sampler:
    """Prepare one contender. Raises what it raises."""
    if device == "cuda" and contender.in_graph:
        return partial(_replayed_s, capture(contender.calls), contender)
    seconds = _host_seconds(contender, device, 1)  # what is made at the first call is made now
    seconds = min(seconds, _host_seconds(contender, device, 1))
    return partial(_host_seconds, contender, device, max(1, round(_LEAST_S / max(seconds, 1e-9))))


def reading_on(device: str) -> tuple[Sampler, int]:
    """A plain read, by our own kernel or by torch's sum on a CPU: how it is timed, and its bytes."""
    words = torch.ones(_READ_BYTES[device] // 4, dtype=torch.int32, device=device)
    read = words.view(torch.float32).sum if device == "cpu" else partial(stream_read, words, sums_for(words))
    return sampler_on(device, CallCycle([read])), words.nbytes


def _replayed_s(graph: torch.cuda.CUDAGraph, contender: CallCycle) -> float:
    """Of one call. The contender is kept beside its graph, which works on its tensors' memory."""
    return replay_s(graph) / len(contender.calls)


def _host_seconds(contender: CallCycle, device: str, cycles: int) -> float:
    """Of one call, all of the cycle in turn."""
    wait_for(device)
    start = time.perf_counter()
    for _ in range(cycles):
        for call in contender.calls:
            call()
    wait_for(device)
    return (time.perf_counter() - start) / (cycles * len(contender.calls))


def wait_for(device: str) -> None:
    """Until it has done all that it was given. Raises what went wrong there."""
    if device == "cuda":
        torch.cuda.synchronize()
