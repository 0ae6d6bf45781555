"""Samplers that time one contender, by replays of a CUDA graph or by the host's clock."""

import time
from functools import partial
from typing import Final

import torch

from kvscope_engine.bench.kernels.contest import CallCycle, Sampler
from kvscope_kernels.graph_timing import capture, replay_s
from kvscope_kernels.stream_read import stream_read, sums_for

_MIN_SAMPLE_S = 2e-3
"""Minimum duration of a sample in seconds, so that the resolution of the clock does not matter."""
_READ_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}


def sampler_on(device: str, contender: CallCycle) -> Sampler:
    """Prepare `contender` and return its sampler. Raises any exception of the contender."""
    if device == "cuda" and contender.in_graph:
        return partial(_replayed_s, capture(contender.calls), contender)
    seconds = _host_seconds(contender, device, 1)  # the first call includes compilation and allocation
    seconds = min(seconds, _host_seconds(contender, device, 1))
    return partial(_host_seconds, contender, device, max(1, round(_MIN_SAMPLE_S / max(seconds, 1e-9))))


def read_sampler(device: str) -> tuple[Sampler, int]:
    """Return the sampler of a plain read (kvscope's kernel on a GPU, torch's sum on a CPU), and the number of bytes
    read.
    """
    words = torch.ones(_READ_BYTES[device] // 4, dtype=torch.int32, device=device)
    read = words.view(torch.float32).sum if device == "cpu" else partial(stream_read, words, sums_for(words))
    return sampler_on(device, CallCycle([read])), words.nbytes


def _replayed_s(graph: torch.cuda.CUDAGraph, contender: CallCycle) -> float:
    """Return the seconds per call of `graph`.

    `contender` is a parameter to keep its tensors alive, because the graph uses their memory.
    """
    return replay_s(graph) / len(contender.calls)


def _host_seconds(contender: CallCycle, device: str, cycles: int) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(cycles):
        for call in contender.calls:
            call()
    wait_for(device)
    return (time.perf_counter() - start) / (cycles * len(contender.calls))


def wait_for(device: str) -> None:
    """Wait until the device has finished its work. Raises errors of that work."""
    if device == "cuda":
        torch.cuda.synchronize()
