"""The fleet reader: the figures of each engine, with fakes and over real sockets."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.fleet.fleet import Fleet
from kvscope_telemetry.fleet.fleet_list import FleetEntry, parse_list
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.fleet.pool_bins import pool_bins
from kvscope_telemetry.fleet.rates import WINDOW_NS, Rates
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.source import SourceState

WAIT_S = 120.0
S = 1_000_000_000


def wait_for(is_so):
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class FakeMember:
    def __init__(self, entry):
        self.entry, self.num_checks, self.is_closed = entry, 0, False

    def poll(self):
        self.num_checks += 1

    def row(self):
        return FleetRow(self.entry, SourceState.LIVE, num_running=self.num_checks)

    def close(self):
        self.is_closed = True


def test_changing_the_fleet_list_does_not_reopen_engines_that_stay_listed():
    opened = []

    def opener(entry, _context):
        opened.append(FakeMember(entry))
        return opened[-1]

    a, b, c = parse_list("ipc:///tmp/a\nipc:///tmp/b\nipc:///tmp/c\n").entries
    fleet = Fleet(opener)
    try:
        fleet.watch((a, b, a))
        wait_for(lambda: [row.entry for row in fleet.rows] == [a, b])
        fleet.watch((c, b))
        wait_for(lambda: [row.entry for row in fleet.rows] == [c, b])
        assert [member.entry for member in opened] == [a, b, c]
        assert [member.is_closed for member in opened] == [True, False, False]
        seen = opened[1].num_checks
        wait_for(lambda: opened[1].num_checks > seen)
    finally:
        fleet.close()
    assert all(member.is_closed for member in opened)


def test_fleet_shows_the_figures_of_three_engines_over_real_sockets(tmp_path):
    engines = [SimulatedEngine(num_blocks=200 + 2000 * number, num_running=4, epoch=number + 1) for number in range(3)]
    where = [f"ipc://{tmp_path}/{number}/telemetry" for number in range(3)]
    servers = [SimulatedServer(engine, at, rate=20.0) for engine, at in zip(engines, where, strict=True)]
    num_threads = threading.active_count()
    fleet = Fleet()
    try:
        fleet.watch(parse_list("\n".join([*where, f"ipc://{tmp_path}/away/telemetry nobody"])).entries)
        assert threading.active_count() == num_threads + 1
        wait_for(lambda: sum(row.state is SourceState.LIVE for row in fleet.rows) == 3)
        wait_for(lambda: all(row.first_token_s is not None for row in fleet.rows[:3]))
        wait_for(lambda: all(row.preemptions_per_s is not None for row in fleet.rows[:3]))
        for server in servers:
            server.hold()
        wait_for(lambda: [row.usage for row in fleet.rows[:3]] == [share_held(engine) for engine in engines])
        for row, engine in zip(fleet.rows, engines, strict=False):
            assert row.engine == "kvscope"
            assert row.version
            assert row.num_blocks == engine.ledger.num_blocks
            assert row.bins == pool_bins(engine.ledger.state)
            assert len(row.bins) == min(1024, engine.ledger.num_blocks)
            assert 0 <= row.hit_rate <= 1
        away = fleet.rows[3]
        assert (away.name, away.state, away.usage, away.num_running) == ("nobody", SourceState.CONNECTING, None, None)
        servers[0].close()
        wait_for(lambda: fleet.rows[0].state is SourceState.ENDED)
        assert fleet.rows[0].usage is None
        assert fleet.rows[0].version  # static facts stay known
    finally:
        fleet.close()
        for server in servers:
            server.close()


def share_held(engine):
    return int(np.count_nonzero(engine.ledger.state == BlockState.ACTIVE)) / engine.ledger.num_blocks


def test_fleet_engine_with_an_unreadable_key_file_is_shown_as_refused(tmp_path):
    entry = FleetEntry(Address("tcp://127.0.0.1:7710", key=tmp_path / "none.key"))
    fleet = Fleet()
    try:
        fleet.watch([entry])
        wait_for(lambda: len(fleet.rows) == 1)
        assert fleet.rows[0].state is SourceState.REFUSED
        assert "none.key" in fleet.rows[0].reason
    finally:
        fleet.close()


def test_fleet_rates_cover_only_the_last_minute():
    rates = Rates()
    assert (rates.hit_rate(), rates.preemptions_per_s(), rates.first_token_s(0)) == (None, None, None)
    rates.count(Counters(prompt_tokens=1000, cached_tokens=0, preemptions=50), S)
    assert (rates.hit_rate(), rates.preemptions_per_s()) == (None, None)
    rates.count(Counters(prompt_tokens=1100, cached_tokens=300, preemptions=54), 3 * S)
    assert rates.hit_rate() == pytest.approx(0.75)
    assert rates.preemptions_per_s() == pytest.approx(2.0)
    rates.first_tokens(np.array([1, 2, 9], "<u8").tobytes(), S)
    assert rates.first_token_s(S) == pytest.approx(2e-9)
    rates.count(Counters(prompt_tokens=1100, cached_tokens=300, preemptions=54), 4 * S + WINDOW_NS)
    assert rates.first_token_s(4 * S + WINDOW_NS) is None
    assert rates.hit_rate() is None


def test_small_fleet_map_shows_even_a_single_active_block():
    state = np.zeros(5000, np.uint8)
    state[0], state[4000:] = BlockState.ACTIVE, BlockState.CACHED
    bins = pool_bins(state)
    assert len(bins) == len(bins.cached) == 1024
    assert bins.active[0] > 0
    assert bins.active[1:] == bytes(1023)
    assert bins.cached[-1] == 255
    assert pool_bins(state[:0]) is None
