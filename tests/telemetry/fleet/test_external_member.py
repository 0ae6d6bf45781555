"""A fleet row of another engine, from a fake source: unreported values are unknown."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.fleet.external_member import ExternalMember
from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    Counters,
    DeviceInfo,
    Hello,
    Histogram,
    ModelInfo,
    Reading,
    Snapshot,
)
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SourceState, SourceStatus, Update

ENTRY = FleetEntry(Address("vllm://gpu-box:8000"), "box")


class FakeSource:
    name = "vllm://gpu-box:8000"

    def __init__(self):
        self.mirror, self.updates = Mirror(), []
        self.status = SourceStatus(SourceState.CONNECTING)
        self.is_closed = False

    def update_mirror(self):
        if not self.updates:
            return None
        self.mirror.apply(self.updates[0])
        return self.updates.pop(0)

    def close(self):
        self.is_closed = True


@pytest.fixture
def source():
    return FakeSource()


def snapshot():
    ledger = Ledger(8)
    ledger.state[:3] = BlockState.CACHED
    hello = Hello(
        epoch=1,
        time_ns=1,
        wall_time_ns=1,
        model=ModelInfo(name="org/model-7B"),
        cache=CacheInfo(num_blocks=8, block_size=16),
        device=DeviceInfo(kind="cuda"),
        engine_version="0.11.0",
        capabilities=Capabilities(engine="vllm", free_rows=False, latencies=False),
    )
    return Snapshot(
        hello=hello, seq=1, step=1, time_ns=1, blocks=ledger.pack_all(), counters=Counters(num_running=5, num_waiting=2)
    )


def reading(*counts, used_share=0.25):
    bounds = np.array([100_000_000, 500_000_000], "<u8").tobytes()
    histogram = Histogram("first_token", bounds, np.array(counts, "<u8").tobytes())
    return Reading(epoch=1, time_ns=2, used_share=used_share, latencies=(histogram,))


def test_fleet_row_has_unknown_values_before_the_first_update(source):
    row = ExternalMember(ENTRY, source).row()
    assert (row.name, row.engine, row.state) == ("box", "vllm", SourceState.CONNECTING)
    assert (row.usage, row.num_running, row.first_token_s, row.bins, row.version) == (None, None, None, None, "")


def test_fleet_row_of_an_engine_without_metrics_has_blocks_but_no_counts(source):
    member = ExternalMember(ENTRY, source)
    source.updates.append(Update(snapshot=snapshot()))
    source.status = SourceStatus(SourceState.LIVE)
    member.poll()
    row = member.row()
    assert (row.usage, row.num_running, row.num_waiting, row.preemptions_per_s) == (None, None, None, None)
    assert (row.version, row.model, row.num_blocks, len(row.bins)) == ("0.11.0", "org/model-7B", 8, 8)
    assert row.bins.cached == bytes([255] * 3 + [0] * 5)


def test_fleet_latency_from_histogram_buckets_is_marked_as_a_bound(source):
    member = ExternalMember(ENTRY, source)
    source.updates.append(Update(snapshot=snapshot(), readings=(reading(1, 3, 0), reading(0, 2, 1))))
    source.status = SourceStatus(SourceState.LIVE)
    member.poll()
    row = member.row()
    assert (row.usage, row.num_running, row.num_waiting) == (0.25, 5, 2)
    assert (row.first_token_s, row.is_first_token_bound) == (0.5, True)
    source.status = SourceStatus(SourceState.STALE, "no telemetry for 9 s")
    row = member.row()
    assert (row.usage, row.num_running, row.bins, row.reason) == (None, None, None, "no telemetry for 9 s")
    member.close()
    assert source.is_closed


def test_median_above_the_last_bucket_is_unknown(source):
    member = ExternalMember(ENTRY, source)
    source.updates.append(Update(snapshot=snapshot(), readings=(reading(0, 0, 4),)))
    source.status = SourceStatus(SourceState.LIVE)
    member.poll()
    assert (member.row().first_token_s, member.row().is_first_token_bound) == (None, False)
