"""Tests of the history: time bins, gaps, engine restarts, clocks and memory limits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from kvscope_app.session.history import BIN_NS, History
from kvscope_app.session.request_times import RequestTimes
from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.telemetry import (
    Batch,
    CacheInfo,
    Counters,
    DeviceInfo,
    DeviceSample,
    Event,
    EventData,
    Frame,
    Heartbeat,
    Hello,
    ModelInfo,
    Progress,
    Reading,
    RequestRows,
    Snapshot,
)
from kvscope_telemetry.mirror.coalesce import coalesce, merge
from kvscope_telemetry.source import Update

SECOND = 1_000_000_000
START = 100 * SECOND


def mirror(epoch=7, free=6, active=3, cached=1):
    counts = {"num_available_blocks": free, "num_active": active, "num_cached": cached}
    return SimpleNamespace(epoch=epoch, capabilities=OWN_ENGINE, used_share=-1.0, num_blocks=0, **counts)


def frame(seq, time_ns, *, decode=0, prefill=0, preemptions=0, running=0, **more):
    return Frame(
        epoch=7,
        seq=seq,
        step=seq,
        time_ns=time_ns,
        batch=Batch(num_prefill_tokens=prefill, num_decode_tokens=decode),
        counters=Counters(preemptions=preemptions, num_running=running),
        **more,
    )


def heartbeat(time_ns):
    return Update(heartbeat=Heartbeat(epoch=7, time_ns=time_ns, seq=0, step=0))


def snapshot(epoch, **totals):
    hello = Hello(
        epoch=epoch,
        time_ns=0,
        wall_time_ns=0,
        model=ModelInfo(name="m"),
        cache=CacheInfo(num_blocks=0, block_size=16),
        device=DeviceInfo(kind="cpu"),
    )
    counters = Counters(**totals)
    return Update(snapshot=Snapshot(hello=hello, seq=0, step=0, time_ns=0, blocks=BlockRows(), counters=counters))


def test_tokens_of_a_bin_are_summed_and_converted_to_a_rate():
    history = History()
    frames = [frame(i, START + i * 10_000_000, decode=3, prefill=5) for i in range(1, 9)]
    history.add_update(coalesce(frames), mirror(), START + 85_000_000)
    window = history.window(1.0, START + 85_000_000)
    assert window.columns["decode_tokens"][-1] == 24
    assert window.rate("prefill_tokens")[-1] == pytest.approx(40 * SECOND / BIN_NS)
    assert window.columns["num_steps"][-1] == 8


def test_bins_without_reports_are_nan_instead_of_0():
    history = History()
    history.add_update(coalesce([frame(1, START, decode=1)]), mirror(), START)
    window = history.window(1.0, START)
    assert np.isnan(window.columns["decode_tokens"][:-1]).all()
    assert np.isnan(window.columns["blocks_free"][:-1]).all()


def test_idle_engine_keeps_its_gauges_and_has_0_tokens():
    history = History()
    history.add_update(coalesce([frame(1, START, decode=1, running=4)]), mirror(active=9), START)
    history.add_update(heartbeat(START + SECOND // 2), mirror(active=9), START + SECOND // 2)
    window = history.window(0.4, START + SECOND // 2)
    assert window.columns["num_running"].tolist() == [4] * 5
    assert window.columns["blocks_active"].tolist() == [9] * 5
    assert window.columns["decode_tokens"].tolist() == [0] * 5


def test_history_shows_the_number_of_running_requests_from_a_snapshot():
    history = History()
    history.add_update(snapshot(7, num_running=2), mirror(), START)
    assert history.window(1.0, START).columns["num_running"][-1] == 2


@pytest.mark.parametrize("times", [(1, 2**62), (2**62, 1), (START, 2**61, 1)])
def test_jumping_frame_times_do_not_grow_the_history(times):
    history = History(max_seconds=10)
    for seq, time_ns in enumerate(times, 1):
        history.add_update(coalesce([frame(seq, time_ns, decode=1, running=3)]), mirror(), START + seq)
    assert history.window(1.0, START).columns["num_running"][-1] == 3


def test_missing_telemetry_leaves_a_gap():
    history = History()
    history.add_update(coalesce([frame(1, START, decode=1)]), mirror(), START)
    history.add_update(coalesce([frame(2, START + 5 * SECOND, decode=1)]), mirror(), START + 5 * SECOND)
    column = history.window(5.0, START + 5 * SECOND).columns["decode_tokens"]
    assert np.isfinite(column[[0, -1]]).all()
    assert np.isnan(column[1:-1]).all()


def test_loading_engine_does_not_extend_the_curves_of_the_last_engine():
    history = History()
    history.add_update(coalesce([frame(1, START, decode=1)]), mirror(active=9), START)
    for seconds in range(1, 6):
        now_ns = START + seconds * SECOND
        history.add_update(Update(progress=Progress(stage="load")), mirror(active=9), now_ns)
    column = history.window(5.0, START + 5 * SECOND).columns["blocks_active"]
    assert column[0] == 9
    assert np.isnan(column[1:]).all()


def test_late_frames_are_counted_in_the_bin_of_their_time():
    history = History()
    history.add_update(coalesce([frame(1, START, decode=1, running=1)]), mirror(), START)
    history.add_update(coalesce([frame(2, START + 150_000_000, decode=7, running=5)]), mirror(), START + 320_000_000)
    window = history.window(0.3, START + 320_000_000)
    assert window.columns["decode_tokens"].tolist() == [1, 7, 0, 0]
    assert window.columns["num_running"].tolist() == [1, 5, 5, 5]


def test_past_of_an_engine_is_placed_by_its_newest_heartbeat():
    history, external = History(), mirror()
    external.capabilities = replace(OWN_ENGINE, free_rows=False)
    external.num_blocks = 8
    readings = [Reading(epoch=7, time_ns=time_ns, used_share=share) for time_ns, share in ((0, 0.5), (START, 0.25))]
    beat = Heartbeat(epoch=7, time_ns=START, seq=1, step=1)
    history.add_update(coalesce([frame(1, 0, decode=7)], heartbeat=beat, readings=readings), external, START)
    past = history.window(0.1, BIN_NS).columns
    assert (past["decode_tokens"][0], past["blocks_active"][0]) == (7, 4)
    assert history.window(0.1, START).latest("blocks_active") == 2


def test_engine_time_is_aligned_with_the_local_clock():
    history = History()
    ahead = 5_000 * SECOND
    for i in range(20):
        now = START + i * 50_000_000
        late = (i % 3) * 20_000_000
        history.add_update(coalesce([frame(i + 1, now - late + ahead, decode=1)]), mirror(), now)
    assert np.nansum(history.window(1.0, START + SECOND).columns["decode_tokens"]) == 20


def test_history_continues_across_an_engine_restart():
    history = History()
    history.add_update(snapshot(7), mirror(7), START)
    history.add_update(coalesce([frame(1, 5, decode=11)]), mirror(7), START)
    history.add_update(snapshot(8), mirror(8), START + SECOND)
    history.add_update(coalesce([frame(1, 1, decode=13)]), mirror(8), START + SECOND)
    column = history.window(1.0, START + SECOND).columns["decode_tokens"]
    assert column[0] == 11
    assert column[-1] == 13


def test_preemptions_are_counted_from_the_first_snapshot_and_across_a_resync():
    history = History()
    history.add_update(snapshot(7, preemptions=40), mirror(), START)
    history.add_update(coalesce([frame(1, START, preemptions=41)]), mirror(), START)
    history.add_update(snapshot(7, preemptions=45), mirror(), START)
    history.add_update(coalesce([frame(9, START, preemptions=46)]), mirror(), START)
    assert np.nansum(history.window(1.0, START).columns["preemptions"]) == 6


def test_totals_of_a_restarted_engine_are_not_counted_as_events():
    history = History()
    history.add_update(snapshot(7), mirror(7), START)
    history.add_update(coalesce([frame(1, START, preemptions=3)]), mirror(7), START)
    history.add_update(snapshot(8, preemptions=1000), mirror(8), START)
    history.add_update(coalesce([frame(1, START, preemptions=1001)]), mirror(8), START)
    assert np.nansum(history.window(1.0, START).columns["preemptions"]) == 4


def _started(number):
    data = EventData(kind="started", waited_ns=number * SECOND)
    return Event(kind="admitted", time_ns=START, number=number, data=data)


def test_evictions_and_copies_are_counted_from_the_first_snapshot():
    history = History()
    history.add_update(snapshot(7, evicted_blocks=40, copied_blocks=5), mirror(), START)
    assert not history.known_columns
    counters = Counters(evicted_blocks=43, copied_blocks=5)
    later = Frame(epoch=7, seq=1, step=1, time_ns=START, batch=Batch(), counters=counters)
    history.add_update(coalesce([later]), mirror(), START)
    columns = history.window(1.0, START).columns
    assert np.nansum(columns["evicted_blocks"]) == 3
    assert np.nansum(columns["copied_blocks"]) == 0
    assert history.known_columns == {"evicted_blocks"}


def test_queue_time_percentile_is_recorded():
    history = History()
    started = [_started(n) for n in (1, 2, 3)]
    history.add_update(Update(series=coalesce([frame(1, START)]).series, events=tuple(started)), mirror(), START)
    history.add_update(heartbeat(START + SECOND // 2), mirror(), START + SECOND // 2)
    assert history.window(1.0, START + SECOND // 2).latest("queue_p50_s") == pytest.approx(2.0)
    assert "queue_p50_s" in history.known_columns


def test_latencies_are_recorded_as_percentiles_of_their_bin():
    history = History()
    values = (np.arange(1, 101) * 1_000_000).astype("<u8")
    history.add_update(coalesce([frame(1, START, inter_token_ns=values.tobytes())]), mirror(), START)
    history.add_update(heartbeat(START + SECOND // 2), mirror(), START + SECOND // 2)
    window = history.window(1.0, START + SECOND // 2)
    assert window.latest("itl_p50_s") == pytest.approx(0.0505)
    assert window.latest("itl_p95_s") == pytest.approx(0.09505)
    assert np.isnan(window.latest("ttft_p50_s"))
    assert history.inter_token.between(START, START)[0] == pytest.approx(0.0505)
    assert np.isnan(history.inter_token.between(START + 1, START + SECOND)[0])


def test_history_is_bounded_by_time_and_bytes():
    assert History(max_seconds=60).max_seconds == 60
    small = History(max_seconds=600, max_bytes=1 << 20)
    for i in range(40_000):
        small.events.extend([Event(kind="note", time_ns=i)], 7, 0)
    assert small.num_bytes < 3 << 20
    assert len(small.events) < 1_000
    assert small.events.last_serial == 40_000


def test_oldest_bins_are_dropped_when_the_history_is_full():
    history = History(max_seconds=1)
    for i in range(30):
        now = START + i * BIN_NS
        history.add_update(coalesce([frame(i + 1, now, decode=i)]), mirror(), now)
    column = history.window(2.0, START + 29 * BIN_NS).columns["decode_tokens"]
    assert np.isnan(column[:-10]).all()
    assert column[-10:].tolist() == list(range(20, 30))


def test_events_are_found_by_time_and_request():
    history = History()
    events = (
        Event(kind="preempted", time_ns=START, number=3, other=5, cause="no free block"),
        Event(kind="admitted", time_ns=START + SECOND, number=4),
    )
    history.add_update(snapshot(7), mirror(), START)
    history.add_update(coalesce([frame(1, START + SECOND, events=events)]), mirror(), START + SECOND)
    assert [e.event.number for e in history.events.between(START, START)] == [3]
    assert [e.event.kind for e in history.events.of_request(7, 5)] == ["preempted"]
    assert history.events.of_request(8, 5) == []
    assert [e.event.number for e in history.events.since(1)] == [4]


def rows(numbers, tokens):
    return RequestRows(number=np.array(numbers, "<u4").tobytes(), num_output_tokens=np.array(tokens, "<u4").tobytes())


def test_request_times_hold_the_first_and_newest_token_time():
    times = RequestTimes()
    times.add_rows(rows([1, 2], [0, 1]), 100)
    times.add_rows(rows([1, 2, 1], [1, 1, 2]), 200)
    numbers = np.array([1, 2, 3])
    assert times.first_token_ns(numbers).tolist() == [200, 100, -1]
    assert times.last_token_ns(numbers).tolist() == [200, 100, -1]


def test_tokens_from_a_snapshot_have_no_time():
    times = RequestTimes()
    times.add_snapshot(rows([1], [5]))
    assert times.first_token_ns(np.array([1])).tolist() == [-1]
    times.add_rows(rows([1], [5]), 100)
    assert times.last_token_ns(np.array([1])).tolist() == [-1]


def test_token_after_those_of_a_snapshot_is_not_recorded_as_the_first():
    times = RequestTimes()
    times.add_snapshot(rows([1], [5]))
    times.add_rows(rows([1], [6]), 100)
    assert times.first_token_ns(np.array([1])).tolist() == [-1]
    assert times.last_token_ns(np.array([1])).tolist() == [100]
    times.add_rows(rows([2], [0]), 100)
    times.add_snapshot(rows([1, 2], [9, 3]))  # updates between the two were lost
    times.add_rows(rows([2], [4]), 200)
    assert times.first_token_ns(np.array([1, 2])).tolist() == [-1, -1]


def test_merged_frames_keep_the_token_time_of_each_frame():
    history, numbers = History(), np.array([1, 2])
    counts = [(1, rows([1, 2], [0, 0])), (2, rows([1], [1])), (3, rows([1, 2], [2, 1])), (4, rows([1], [2]))]
    frames = [frame(seq, START + seq, requests=changed) for seq, changed in counts]
    history.add_update(merge([coalesce(frames[:2]), coalesce(frames[2:])]), mirror(), START)
    times = history.request_times
    assert times.first_token_ns(numbers).tolist() == [START + 2, START + 3]
    assert times.last_token_ns(numbers).tolist() == [START + 3, START + 3]


def test_request_times_drop_the_oldest_requests_when_full():
    times = RequestTimes(capacity=4)
    times.add_rows(rows([1], [1]), 100)
    times.add_rows(rows([5], [1]), 200)
    assert times.first_token_ns(np.array([1, 5])).tolist() == [-1, 200]


def test_latency_is_recorded_in_one_bin_only():
    history = History()
    update = Update(heartbeat=heartbeat(START).heartbeat, first_token_ns=np.array([SECOND]))
    history.add_update(update, mirror(), START)
    history.add_update(
        Update(), mirror(), START + 2 * BIN_NS
    )  # without a heartbeat, the bin is closed while it is the newest
    history.add_update(heartbeat(START + SECOND), mirror(), START + SECOND)
    column = history.window(2.0, START + SECOND).columns["ttft_p50_s"]
    assert column[np.isfinite(column)].tolist() == [1.0]


def test_device_temperature_is_recorded():
    history = History()
    history.add_update(heartbeat(START), mirror(), START)
    sample = DeviceSample(epoch=7, time_ns=1, temperature_celsius=64.0)
    history.add_update(Update(samples=(sample,)), mirror(), START)
    assert history.window(1.0, START).latest("temperature_celsius") == 64.0
    assert "temperature_celsius" in history.known_columns
