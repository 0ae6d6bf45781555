"""Recording of a simulation: the output of the engine's own step recorder, at simulated time.

Owns the file, and builds the hello message of an engine that does not exist. The desktop plays the file like any other
recording.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvscope_engine.policy.allocation.mapped_pool import page_slots_of
from kvscope_engine.policy.state_pool import max_recorded_tokens
from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.step_recorder import StepRecorder
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Frame,
    Goodbye,
    Hello,
    KVGroup,
    MemoryBreakdown,
    ModelInfo,
    Timings,
)
from kvscope_telemetry.program_version import program_version
from kvscope_telemetry.recordings.writer import RecordingWriter


class SimulationRecording:
    """Records `simulation`, which was created from `setup` and has not started yet.

    `model` is the name of the model that the cost model describes. Raises BadInput for an unsuitable path, and
    KvscopeError on exit if the file could not be written.
    """

    def __init__(self, simulation: Simulation, setup: SimulationSetup, path: Path, model: str) -> None:
        self._simulation = simulation
        self._hello = _hello(setup, simulation, model)
        self._memory = _memory(setup, self._hello)
        self._writer = RecordingWriter(path)
        self._step_recorder = StepRecorder(self._hello.epoch, simulation.pool, simulation.scheduler, self._publish)
        simulation.observe(self)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        hello = self._hello
        self._writer.write(hello, wait=True)
        self._writer.write(self._memory, wait=True)
        self._writer.write(self._step_recorder.snapshot(hello, 0, self._simulation.now_ns), wait=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def step(self, plan: StepPlan, result: StepResult, waited_ns: int) -> None:
        simulation = self._simulation
        timings = Timings(schedule_ns=waited_ns, run_ns=result.forward_ns, forward_ns=result.forward_ns)
        self._step_recorder.record(plan, result, timings, simulation.step_count, simulation.now_ns)

    def end(self) -> None:
        """Record the changes after the last step, and the goodbye message."""
        self._step_recorder.record_idle(self._simulation.step_count, self._simulation.now_ns)
        self._writer.write(Goodbye(epoch=self._hello.epoch), wait=True)

    def _publish(self, frame: Frame) -> None:
        self._writer.write(frame, wait=True)  # a simulation may wait for the disk


def _hello(setup: SimulationSetup, simulation: Simulation, model: str) -> Hello:
    limits, cost = setup.limits, setup.cost
    pages = page_slots_of(simulation.pool)
    num_host, num_disk = setup.num_tier_blocks
    groups = _groups(setup)
    return Hello(
        epoch=secrets.randbits(63),
        time_ns=simulation.now_ns,
        wall_time_ns=time.time_ns(),
        model=ModelInfo(
            name=f"{model} (simulated)",
            num_layers=setup.layout.num_layers if setup.layout is not None else 0,
            max_model_len=limits.max_model_len,
        ),
        cache=CacheInfo(
            num_blocks=simulation.pool.num_blocks,
            num_physical_blocks=pages.space.num_physical_blocks if pages is not None else 0,
            num_host_blocks=num_host,
            num_disk_blocks=num_disk,
            block_size=limits.block_size,
            block_bytes=setup.block_bytes,
            allocator=setup.allocator,
            prefix_caching=simulation.pool.index is not None,
            has_parents=True,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            groups=groups,
            num_states=simulation.pool.num_states,
            num_host_states=simulation.pool.num_host_states,
            state_interval=setup.state_interval if simulation.states is not None else 0,
            num_reserved_blocks=simulation.pool.num_blocks - simulation.pool.num_usable,
        ),
        capabilities=Capabilities(groups=len(groups) > 1, eviction_order=True),
        device=DeviceInfo(
            kind="simulated",
            name=f"{cost.memory_bandwidth / 1e9:.0f} GB/s, {cost.flops_per_second / 1e12:.1f} TFLOP/s",
            total_bytes=round(cost.weight_bytes + setup.block_bytes * limits.num_blocks),
        ),
        engine_version=program_version(),
        pid=os.getpid(),
    )


def _groups(setup: SimulationSetup) -> tuple[KVGroup, ...]:
    """Return the KV groups as the engine publishes them: empty for a single group with full attention and no states."""
    groups = () if setup.block_layout is None else setup.block_layout.groups
    if len(groups) == 1 and groups[0].kind == "full" and not setup.num_states:
        return ()
    size = setup.limits.block_size
    published = tuple(
        KVGroup(
            kind=group.kind,
            num_layers=group.num_layers,
            block_bytes=round(group.token_bytes * size),
            window=group.rule.window,
            expanded_bytes=round(group.expanded_bytes * size),
        )
        for group in groups
    )
    if setup.layout is None or not setup.num_states:
        return published
    longest = max_recorded_tokens(setup.limits.max_model_len)
    return (*published, KVGroup(kind="state", block_size=longest, block_bytes=setup.layout.state_bytes))


def _memory(setup: SimulationSetup, hello: Hello) -> MemoryBreakdown:
    kv_bytes = setup.block_bytes * setup.limits.num_blocks
    return MemoryBreakdown(
        epoch=hello.epoch,
        time_ns=hello.time_ns,
        weights_bytes=hello.device.total_bytes - kv_bytes,
        kv_bytes=kv_bytes,
    )
