"""Computes summaries and timed events from telemetry messages in order. The results are the same in a live session,
while recording, and from a file.

Owns the counts of the current second. The state at the end of the second is read from the follower, to which the caller
passes each message afterwards.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.latencies import LATENCIES
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Counters,
    DeviceSample,
    Event,
    Frame,
    Heartbeat,
    Reading,
    Snapshot,
    Stop,
    TelemetryMessage,
)
from kvscope_telemetry.messages.validity import MAX_I64
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.pool_use import pool_use
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.summaries import latency_buckets
from kvscope_telemetry.summaries.address_bins import bin_rows, count_by_size, free_run_lengths
from kvscope_telemetry.summaries.histograms import Buckets, sum_histograms
from kvscope_telemetry.summaries.moments import MomentRecorder
from kvscope_telemetry.summaries.request_phases import PhaseRecorder
from kvscope_telemetry.summaries.second_peaks import Peak, SecondPeaks
from kvscope_telemetry.summaries.summary import SECOND_NS, AddressBins, CarriedStep, Latency, Summary, TimedEvent
from kvscope_telemetry.summaries.unknown_fields import unknown_fields

_LATE_NS: Final = 2_000_000_000
"""Longest expected interval between heartbeats, which are sent twice a second. After a longer interval, the
engine's whole process had no CPU time and no step could end.
"""
_LEVELS: Final = ("num_running", "num_waiting")
_TOTALS: Final = tuple(
    name for name in Counters.__struct_fields__ if name in Summary.__struct_fields__ and name not in _LEVELS
)
"""Counters whose values are totals since the engine start. A summary contains how much each increased in its second."""
MAX_TIME_NS: Final = (1 << 62) - 1
_PHASES: Final = ("schedule_ns", "run_ns", "forward_ns", "commit_ns", "record_ns")
_MOVED: Final = ("work.weights_bytes", "work.kv_read_bytes", "work.kv_written_bytes", "work.other_bytes")
_COUNTED: Final = (
    *("batch.num_prefill_tokens", "batch.num_decode_tokens", "work.flops"),
    *_MOVED,
    *(f"timings.{name}" for name in _PHASES),
)
_counted_of: Final = attrgetter(*_COUNTED)
_SAMPLED: Final = ("utilization", "power_watts", "temperature_celsius", "process_bytes", "memory_used_bytes")


class Summarizer:
    """Computes summaries. Call `add_message` with every message before passing the message to `follower`.

    `drain_events` returns the events collected so far.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._second = -1
        self._earliest_ns = MAX_TIME_NS
        """Time of the earliest message. Events are not dated earlier."""
        self._epoch: int | None = None
        self._offset_ns = 0
        self._last_seq: int | None = None
        self._step = 0
        self._totals: dict[str, int] = {}
        self._seen_version = -1
        self._events: list[TimedEvent] = []
        self._stall = Stall()
        self._phases = PhaseRecorder()
        self._moments = MomentRecorder()
        self._used_share = self._peak_share = -1.0
        self._newest_ns = self._stops_reported_ns = 0
        self._peaks = SecondPeaks()
        self._start_second()

    def add_message(self, message: TelemetryMessage, log_time_ns: int) -> list[Summary]:
        """Process the next message, recorded at `log_time_ns`. Returns the summaries of seconds that ended."""
        second = log_time_ns // SECOND_NS
        self._earliest_ns = min(self._earliest_ns, log_time_ns)
        done = self.close() if second > self._second else []
        if second > self._second:
            self._second = second
            self._peaks.begin(self._follower.mirror, second * SECOND_NS)
        self._newest_ns = max(log_time_ns, self._newest_ns)
        if isinstance(message, Frame):
            if message.epoch == self._epoch:
                self._count(message, log_time_ns)
        elif isinstance(message, Snapshot):
            self._apply_snapshot(message, log_time_ns)
        elif isinstance(message, DeviceSample) and message.epoch == self._epoch:
            samples = {name: getattr(message, name) for name in _SAMPLED}
            self._sample.update({name: value for name, value in samples.items() if value >= 0})
        elif isinstance(message, Reading) and message.epoch == self._epoch:
            self._readings.append(message)
            self._used_share = message.used_share
            self._peak_share = max(self._peak_share, self._used_share)
        elif isinstance(message, Heartbeat) and message.epoch == self._epoch:
            self._stalled_s = self._stall.update(message)
        return done

    def resume_from(self, snapshot: Snapshot, log_time_ns: int) -> None:
        """Continue from the state of `follower`. The events and phases of this state are not reported again.
        The snapshot's blocks are not used.
        """
        self._apply_snapshot(snapshot, log_time_ns)
        self._peaks.begin(self._follower.mirror, log_time_ns)
        self._phases.drain()
        self._moments.drain()

    def close(self) -> list[Summary]:
        """Return the summary of the current second so far; empty if there is no state."""
        self._follower.apply_pending()
        mirror = self._follower.mirror
        done = []
        if mirror.hello is not None and mirror.epoch == self._epoch and self._second >= 0:
            done = [self._summary(mirror)]
        self._start_second()
        return done

    def restate(self) -> None:
        """Include the address bins in the next summary even if they did not change, because this summary is the
        first of a file.
        """
        self._seen_version = -1

    def drain_events(self) -> list[TimedEvent]:
        events, self._events = self._events, []
        return events

    def _start_second(self) -> None:
        self._frames: list[Frame] = []
        self._peak_share = self._used_share
        self._carried_step: CarriedStep | None = None
        self._has_stepped = False
        self._readings: list[Reading] = []
        self._sums: dict[str, int] = dict.fromkeys(_TOTALS, 0)
        self._num_lost = 0
        self._sample: dict[str, float] = {}
        self._queued_ns: list[int] = []
        self._stalled_s = -1.0

    def _apply_snapshot(self, snapshot: Snapshot, log_time_ns: int) -> None:
        self._add_totals()
        self._peaks.restart(snapshot, log_time_ns, is_new_start=snapshot.hello.epoch != self._epoch)
        if snapshot.hello.epoch != self._epoch:
            self._epoch, self._last_seq, self._totals = snapshot.hello.epoch, None, {}
            self._step = snapshot.step
            self._phases.restart()
            self._stops_reported_ns = 0
            self._used_share = -1.0
        self._offset_ns = log_time_ns - snapshot.time_ns
        self._phases.snapshot(snapshot, self._offset_ns)
        self._moments.snapshot(snapshot)
        self._record_totals(snapshot.counters)
        self._count_lost_frames(snapshot.seq + 1)
        self._last_seq = max(snapshot.seq, self._last_seq or 0)

    def _count(self, frame: Frame, log_time_ns: int) -> None:
        """Collect a frame. The increase of totals is computed at the end of the second."""
        self._offset_ns = log_time_ns - frame.time_ns
        if self._last_seq is not None and frame.seq != self._last_seq + 1:
            self._count_lost_frames(frame.seq)
        self._last_seq = max(frame.seq, self._last_seq or 0)
        self._frames.append(frame)
        self._peaks.add(frame, log_time_ns)
        self._record_step(frame, log_time_ns)
        self._phases.frame(frame, self._offset_ns)
        self._moments.frame(frame)
        for event in frame.events:
            self._record_event(event, frame.epoch)

    def _record_step(self, frame: Frame, log_time_ns: int) -> None:
        if self._has_stepped or not frame.batch.number:
            return
        self._has_stepped = True
        timings = frame.timings
        length_ns = timings.schedule_ns + timings.run_ns + timings.commit_ns
        before_ns = self._second * SECOND_NS - (log_time_ns - length_ns)
        if 0 < before_ns <= length_ns:
            batch = frame.batch
            self._carried_step = CarriedStep(before_ns, length_ns, batch.num_prefill_tokens, batch.num_decode_tokens)

    def _record_event(self, event: Event, epoch: int) -> None:
        time_ns = min(max(event.time_ns + self._offset_ns, self._earliest_ns, 0), MAX_TIME_NS)
        self._events.append(TimedEvent(time_ns, epoch, event))
        if event.kind == "admitted" and event.data is not None:
            self._queued_ns.append(event.data.waited_ns)

    def _count_lost_frames(self, seq: int) -> None:
        if self._last_seq is not None:
            self._num_lost += max(0, seq - self._last_seq - 1)

    def _add_totals(self) -> None:
        """Add the increase of the counter totals over the frames collected so far. Only the last frame is
        needed, because it contains the newest totals.
        """
        if self._frames:
            if not self._totals:
                self._record_totals(self._frames[0].counters)
            self._record_totals(self._frames[-1].counters)

    def _record_totals(self, counters: Counters) -> None:
        """Add the increase of the counter totals. The first value of a total is only a baseline."""
        for name in _TOTALS:
            total = getattr(counters, name)
            grown = max(0, total - self._totals.get(name, total))
            self._sums[name] = min(self._sums[name] + grown, MAX_I64)
            self._totals[name] = total

    def _second_totals(self) -> dict[str, int]:
        self._add_totals()
        counted = zip(*map(_counted_of, self._frames), strict=True) if self._frames else [()] * len(_COUNTED)
        # The sum of valid numbers may exceed the format's range. Real engines do not reach it.
        sums = {name: min(sum(values), MAX_I64) for name, values in zip(_COUNTED, counted, strict=True)}
        return {
            "num_steps": self._num_steps(),
            "prefill_tokens": sums["batch.num_prefill_tokens"],
            "decode_tokens": sums["batch.num_decode_tokens"],
            **{name: sums[f"timings.{name}"] for name in _PHASES},
            **{name: self._sums[name] for name in _TOTALS},
            "flops": sums["work.flops"],
            "moved_bytes": min(sum(sums[name] for name in _MOVED), MAX_I64),
        }

    def _num_steps(self) -> int:
        """Return the number of frames that completed a step. A frame that only reports changes repeats the
        previous step's number.
        """
        previous, count = self._step, 0
        for frame in self._frames:
            count += frame.step != previous
            previous = frame.step
        self._step = previous
        return count

    def _summary(self, mirror: Mirror) -> Summary:
        assert mirror.hello is not None, "a summary of no state"
        cache, ledger = mirror.hello.cache, mirror.ledger
        pool = ledger.part(0, min(cache.num_blocks, ledger.num_blocks))
        runs = free_run_lengths(pool.state)
        is_active = pool.state == BlockState.ACTIVE
        use, peaks = pool_use(mirror), self._peaks.peaks()
        summary = Summary(
            time_ns=self._second * SECOND_NS,
            epoch=mirror.hello.epoch,
            step=mirror.step,
            num_lost_frames=self._num_lost,
            num_running=mirror.counters.num_running,
            num_waiting=mirror.counters.num_waiting,
            active_blocks=mirror.num_active,
            cached_blocks=mirror.num_cached,
            free_blocks=mirror.num_available_blocks,
            shared_blocks=int(np.count_nonzero(pool.ref_count > 1)),
            host_blocks=_in_use(mirror, Tier.HOST),
            disk_blocks=_in_use(mirror, Tier.DISK),
            used_slots=int(pool.filled[is_active].sum(dtype=np.int64)),
            longest_free_run=int(runs.max(initial=0)),
            num_free_runs=len(runs),
            free_runs=count_by_size(runs),
            first_token=_latency([frame.first_token_ns for frame in self._frames]),
            inter_token=_latency([frame.inter_token_ns for frame in self._frames]),
            queued=_latency([np.array(self._queued_ns, "<u8").tobytes()]),
            num_rows=mirror.num_rows,
            bins=self._bins(mirror, cache.block_size),
            longest_wait_s=self._longest_wait_s(mirror),
            stalled_s=self._stalled_s,
            phases=self._phases.drain(),
            stops=self._stops(mirror),
            moments=self._moments.drain(),
            peak_active_blocks=peaks.active_blocks.value,
            peak_active_ns=self._since_begin_ns(peaks.active_blocks),
            peak_running=peaks.running.value,
            peak_running_ns=self._since_begin_ns(peaks.running),
            peak_waiting=peaks.waiting.value,
            peak_waiting_ns=self._since_begin_ns(peaks.waiting),
            held_slots=use.num_held,
            wasted_slots=use.num_wasted,
            carried_step=self._carried_step,
            **self._second_totals(),
        )
        summary = msgspec.structs.replace(summary, **self._sample)
        return summary if mirror.capabilities == OWN_ENGINE else self._without_unknown(summary, mirror)

    def _since_begin_ns(self, peak: Peak) -> int:
        return max(0, peak.time_ns - self._second * SECOND_NS)

    def _without_unknown(self, summary: Summary, mirror: Mirror) -> Summary:
        """Return a copy of `summary` adapted to the capabilities of this engine.

        Some values are taken from messages other than frames if the engine reports them there. Values that it does not
        report at all are marked as unknown.
        """
        capabilities = mirror.capabilities
        changes: dict[str, object] = dict.fromkeys(unknown_fields(capabilities), -1)
        if not capabilities.free_rows:
            changes["pool_blocks"] = mirror.num_blocks
            if self._used_share >= 0:
                changes["active_blocks"] = round(self._used_share * mirror.num_blocks)
                changes["peak_active_blocks"] = round(self._peak_share * mirror.num_blocks)
        if not capabilities.steps and capabilities.counters:
            changes |= {"prefill_tokens": self._sums["prompt_tokens"], "decode_tokens": self._sums["generation_tokens"]}
        if not capabilities.latencies:
            changes |= {
                name: latency_of(sum_histograms(self._readings, name))
                for name in (latency.key for latency in LATENCIES)
            }
        if not capabilities.requests:
            changes |= {"phases": None, "moments": None}
        if not capabilities.physical_rows:
            changes["bins"] = None
        return msgspec.structs.replace(summary, **changes)

    def _stops(self, mirror: Mirror) -> tuple[Stop, ...]:
        now_ns = self._newest_ns - self._offset_ns
        new_stops = RunningTime(mirror.stops.since(self._stops_reported_ns)).within(0, now_ns)
        self._stops_reported_ns = now_ns
        return tuple(RunningTime(new_stops).shifted(self._offset_ns))

    def _longest_wait_s(self, mirror: Mirror) -> float:
        arrivals = mirror.requests.arrival_ns[mirror.requests.state == RequestState.WAITING]
        if not arrivals.size:
            return 0.0
        end_ns = (self._second + 1) * SECOND_NS - self._offset_ns
        return mirror.stops.running_ns(int(arrivals.min()), end_ns) / 1e9

    def _bins(self, mirror: Mirror, block_size: int) -> AddressBins | None:
        if mirror.version == self._seen_version:
            return None
        self._seen_version = mirror.version
        return bin_rows(mirror.ledger, block_size)


def _in_use(mirror: Mirror, tier: Tier) -> int:
    return mirror.count(BlockState.ACTIVE, tier) + mirror.count(BlockState.CACHED, tier)


def latency_of(buckets: Buckets | None) -> Latency:
    """Return the count and percentiles of the latencies in a histogram, with the lower bounds of the percentiles."""
    if buckets is None or not buckets.total:
        return Latency()
    p50, p95, p99 = (buckets.percentile(share) for share in (0.50, 0.95, 0.99))
    return Latency(
        count=buckets.total,
        p50_s=p50.high if math.isfinite(p50.high) else -1.0,
        p95_s=p95.high if math.isfinite(p95.high) else -1.0,
        p99_s=p99.high if math.isfinite(p99.high) else -1.0,
        p50_above_s=p50.low,
        p95_above_s=p95.low,
        p99_above_s=p99.low,
    )


def _latency(parts: list[bytes]) -> Latency:
    values = np.frombuffer(b"".join(parts), "<u8")
    if not values.size:
        return Latency()
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return Latency(len(values), p50 / 1e9, p95 / 1e9, p99 / 1e9, buckets=latency_buckets.pack(values / 1e9))


class Stall:
    """Measures how long an engine's unfinished requests have been without a completed step. Depends on heartbeats only.

    Uses the engine's clock, so that a slow window or network does not make the engine look slower. Feed it the
    heartbeats of an engine in order.
    """

    def __init__(self) -> None:
        self._last_step: tuple[int, int] | None = None  # epoch and step
        self._since_ns = self._last_ns = 0

    def update(self, beat: Heartbeat) -> float:
        """Return the seconds since the last step ended or the engine last became idle; 0 while the engine is paused."""
        step = (beat.epoch, beat.step)
        if step != self._last_step or not beat.num_unfinished or beat.paused_by:
            self._last_step, self._since_ns = step, beat.time_ns
        elif beat.time_ns - self._last_ns > _LATE_NS:
            self._since_ns += beat.time_ns - self._last_ns
        self._last_ns = beat.time_ns
        return max(0, beat.time_ns - self._since_ns) / 1e9
