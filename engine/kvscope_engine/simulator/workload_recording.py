"""Reads from a recording, in one pass, what a simulation needs: requests, costs of steps, and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvscope_engine.simulator.costs.recorded_costs import RecordedCosts, StepSampler
from kvscope_engine.simulator.kv_layout import recorded_token_bytes
from kvscope_engine.simulator.workloads.recorded_workload import recorded_workload
from kvscope_engine.simulator.workloads.workload import Workload
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import read_requests


@dataclass(frozen=True, slots=True)
class WorkloadRecording:
    hello: Hello
    workload: Workload
    costs: RecordedCosts | None
    """None if the recording does not contain the duration of steps, or the size of a token."""


def read_workload_recording(path: Path, max_requests: int | None = None) -> WorkloadRecording:
    """Read a recording. The workload is that of `read_recording`. Raises BadInput if the file is no recording, or has
    no requests.
    """
    recording = Recording.open(path)
    hello = recording.info.hello
    sampler = StepSampler(hello.model, recorded_token_bytes(hello.cache))
    records = read_requests(recording, sampler.observe)
    return WorkloadRecording(hello, recorded_workload(path, recording, records, max_requests), sampler.costs())
