"""A recorded simulation: its frames rebuild the pool, and it can be simulated again with the same requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulated_tiers import SimulatedTiers
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_recording import SimulationRecording
from kvscope_engine.simulator.simulation_report import make_report
from kvscope_engine.simulator.workloads.generators import GeneratorOptions, generate
from kvscope_engine.simulator.workloads.recorded_workload import read_recording
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, MemoryBreakdown, Snapshot
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording

LIMITS = SimulatedLimits(num_blocks=120, max_num_seqs=16, max_model_len=512)
BLOCK_BYTES = 16 * 819_200
Record = Callable[..., Simulation]


@pytest.fixture
def workload() -> Workload:
    return generate("mixed", GeneratorOptions(num_requests=60, rate=4, shared_prefix_tokens=100, seed=3), 512)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Function that runs a workload to its end and records it as `run.mcap`: `record(workload, allocator)`."""

    def run(workload: Workload, allocator: str = "paged", limits: SimulatedLimits = LIMITS) -> Simulation:
        setup = SimulationSetup(workload, limits, PRESETS["opt-13b"].cost, allocator)
        simulation = Simulation(setup)
        with SimulationRecording(simulation, setup, tmp_path / "run.mcap", "opt-13b"):
            simulation.run()
        return simulation

    return run


@pytest.mark.parametrize("allocator", ["paged", "contiguous", "buddy", "oracle", "virtual"])
def test_recording_ends_where_the_simulation_did(
    record: Record, workload: Workload, tmp_path: Path, allocator: str
) -> None:
    simulation = record(workload, allocator)
    recording = Recording.open(tmp_path / "run.mcap")
    info = recording.info
    assert info.is_complete
    assert info.hello.cache.allocator == allocator
    assert info.hello.model.name == "opt-13b (simulated)"
    assert simulation.step_count <= info.num_frames <= simulation.step_count + 1
    assert info.duration_s == pytest.approx(simulation.now_ns / 1e9, abs=1e-9)
    mirror = recording.state_at(info.duration_s)
    assert mirror.ledger.differences(simulation.pool.ledger) == []
    assert mirror.time_ns == simulation.now_ns
    assert (mirror.requests.state == RequestState.FINISHED).all()
    assert mirror.counters.finished == 60
    assert mirror.counters.generation_tokens == simulation.tally.num_output_tokens
    memory = [message for _, message in recording.messages(0, 0) if isinstance(message, MemoryBreakdown)]
    assert memory[0].weights_bytes == pytest.approx(2 * 12.85e9)


@pytest.mark.parametrize("allocator", ["paged", "buddy"])
def test_mirror_played_to_the_end_equals_the_pool_of_the_simulation(
    record: Record, workload: Workload, tmp_path: Path, allocator: str
) -> None:
    simulation = record(workload, allocator)
    mirror = Mirror()
    with PlaybackSource(Recording.open(tmp_path / "run.mcap"), clock=count(0, 100_000_000).__next__) as source:
        source.set_speed(1000.0)
        assert source.wait(lambda: source.is_at_end, 60.0)
        while (update := source.poll_update()) is not None:
            mirror.apply(update)
    assert mirror.ledger.differences(simulation.pool.ledger) == []
    assert (mirror.step, mirror.time_ns) == (simulation.step_count, simulation.now_ns)
    assert not np.count_nonzero(mirror.requests.state != RequestState.FINISHED)


def test_state_in_the_middle_of_a_recorded_simulation_equals_the_simulation_at_that_step(
    record: Record, workload: Workload, tmp_path: Path
) -> None:
    """The state in the middle is that of a simulation stopped there."""
    whole = record(workload)
    recording = Recording.open(tmp_path / "run.mcap")
    other = Simulation(SimulationSetup(workload, LIMITS, PRESETS["opt-13b"].cost, "paged"))
    while other.step_count < whole.step_count // 2:
        other.advance()
    mirror = recording.state_at(other.now_ns / 1e9)
    assert mirror.step == other.step_count
    assert mirror.ledger.differences(other.pool.ledger) == []


@pytest.mark.parametrize("allocator", ["paged", "buddy"])
def test_simulating_a_recording_again_has_the_same_requests(
    record: Record, workload: Workload, tmp_path: Path, allocator: str
) -> None:
    record(workload, allocator)
    again = read_recording(tmp_path / "run.mcap")
    shape = [(one.arrival_ns, one.num_prompt_tokens, one.num_output_tokens) for one in workload.requests]
    assert [(one.arrival_ns, one.num_prompt_tokens, one.num_output_tokens) for one in again.requests] == shape
    assert read_recording(tmp_path / "run.mcap", 7).requests == again.requests[:7]


def test_shared_prefixes_are_known_from_the_block_hashes(record: Record, workload: Workload, tmp_path: Path) -> None:
    before = record(workload)
    again = read_recording(tmp_path / "run.mcap")
    beginnings = {one.text_ids[:6] for one in again.requests if one.num_output_tokens > 1}
    assert len(beginnings) == 1  # 100 tokens are 6 full blocks of 16
    assert len(beginnings.pop()) == 6
    assert not any(one.text_ids for one in again.requests if one.num_output_tokens == 1)  # never seen with blocks
    after = Simulation(SimulationSetup(again, LIMITS, PRESETS["opt-13b"].cost, "paged"))
    after.run()
    first, second = make_report(before).prefix_hit_rate, make_report(after).prefix_hit_rate
    assert first is not None
    assert second == pytest.approx(first, rel=0.1)


def test_without_prefix_caching_no_shared_prefixes_are_known(
    record: Record, workload: Workload, tmp_path: Path
) -> None:
    record(workload, "oracle")
    assert not any(request.text_ids for request in read_recording(tmp_path / "run.mcap").requests)


@pytest.mark.parametrize("preemption", ["auto", "swap"])
def test_frames_with_lower_tiers_rebuild_the_ledger(tmp_path: Path, preemption: str) -> None:
    """This holds after each step in every row of every tier, and wherever the recording is opened."""
    tiers = SimulatedTiers(kv_host_memory=60 * BLOCK_BYTES, kv_disk=200 * BLOCK_BYTES, preemption=preemption)
    options = GeneratorOptions(num_requests=60, rate=8, shared_prefix_tokens=100, num_prefixes=6, seed=3)
    cost = replace(PRESETS["opt-13b"].cost, disk_bandwidth=1e12)
    setup = SimulationSetup(generate("mixed", options, 512), LIMITS, cost, "paged", tiers=tiers)
    simulation = Simulation(setup)
    mirror, states, ledgers = Mirror(), [], {}
    with SimulationRecording(simulation, setup, tmp_path / "run.mcap", "opt-13b"):
        while simulation.advance():
            ledgers[simulation.step_count] = simulation.pool.ledger.pack_all()
            if simulation.step_count % 100 == 50:
                states.append((simulation.now_ns, ledgers[simulation.step_count]))
    used = make_report(simulation).tiers
    assert used is not None
    assert min(used.swapped_blocks, used.offloaded_blocks, used.disk_blocks, used.loaded_from_disk_blocks) > 0
    opened = Recording.open(tmp_path / "run.mcap")
    cache = opened.info.hello.cache
    assert (cache.num_blocks, cache.num_host_blocks, cache.num_disk_blocks) == (120, 60, 200)
    for _, message in opened.messages():
        if isinstance(message, Snapshot) and not mirror.epoch:
            mirror.reset(message)
        elif isinstance(message, Frame):
            mirror.apply(coalesce([message]))
            assert mirror.ledger.pack_all() == ledgers[message.step]
    assert mirror.step == simulation.step_count > len(states) > 2
    for now_ns, blocks in states:
        assert opened.state_at(now_ns / 1e9).ledger.pack_all() == blocks
    counters = opened.state_at(opened.info.duration_s).counters
    assert (counters.swapped_blocks, counters.loaded_blocks) == (used.swapped_blocks, used.loaded_blocks)


def test_text_of_a_single_prompt_is_not_shared(record: Record, tmp_path: Path) -> None:
    requests = (
        WorkloadRequest(0, 100, 4),
        WorkloadRequest(10**9, 64, 4, (0, 1)),
        WorkloadRequest(2 * 10**9, 64, 4, (0,)),
    )
    record(Workload("by hand", requests, 32))
    texts = [request.text_ids for request in read_recording(tmp_path / "run.mcap").requests]
    assert [len(text) for text in texts] == [0, 2, 2]
    assert texts[1] == texts[2]


def test_recording_without_requests_is_refused(record: Record, tmp_path: Path) -> None:
    record(Workload("too long", (WorkloadRequest(0, 5000, 1),)))
    assert Recording.open(tmp_path / "run.mcap").state_at(0).counters.refused == 1
    with pytest.raises(BadInput, match="contains no requests"):
        read_recording(tmp_path / "run.mcap")
