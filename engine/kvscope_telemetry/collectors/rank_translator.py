"""Translates KV events and metrics of an external engine to a `CacheState` and its frames.

Owns the epoch and its state, and decides when a snapshot is sent. Uses no sockets, and a clock only to date an epoch:
callers pass `now_ns`, this machine's monotonic time or, for engines in Prometheus, the time since 1970.

An epoch is the lifetime of the displayed state, not of the engine. A new one starts when the engine restarts, when the
cache is reported from the start again, when the ledger changes its number of rows, and when the engine reports another
model or configuration. Within an epoch a snapshot must not contain anything that the frames did not: a reader that is
up to date skips it, and would treat a sequence number that only the snapshot had as a lost frame. Ledgers grow by
doubling, so there are few epochs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import asdict

from kvscope_telemetry.collectors.block_tokens import BlockTokens
from kvscope_telemetry.collectors.cached_rows import CachedRows
from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.hello import hello_of
from kvscope_telemetry.collectors.reading_totals import ReadingTotals, breakdown
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.kv_events.batches import BlockStored, EventBatch
from kvscope_telemetry.kv_events.stream_items import Gap, Received, Reset, StreamItem
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import (
    Event,
    Frame,
    Heartbeat,
    Reading,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE
from kvscope_telemetry.producer.cache_state import CacheState

MAX_JUMPS: Final = 2
COUNTER_JUMP_WINDOW_NS: Final = 60_000_000_000
"""Time in ns within which counters may jump at most `MAX_JUMPS` times. More jumps indicate several engines behind one
address.

The counters of a single engine fall when it restarts, and do not return to their earlier values.
"""
MAX_TOKENS_PER_S: Final = 5_000_000
"""Tokens per second that a single engine cannot exceed. A faster increase means that the counters are another
engine's.
"""
SEVERAL_ENGINES: Final = "its counters go up and down: are several engines behind this address?"
MAX_NOTES: Final = 32
"""Maximum number of data quality events between two frames. If there are more, one further event says how many
were omitted.
"""
MAX_CHARACTERS: Final = 500
HEARTBEAT_NS: Final = 500_000_000
MANY_ROWS: Final = 400_000
"""Maximum number of ledger rows in a frame, because the size of a message is limited."""
USUAL_BLOCK_SIZE: Final = 16
"""Assumed block size in tokens until a block is reported, if the server does not report a size."""
_EPOCH_BITS: Final = 62


class RankTranslator:
    """State of one data-parallel rank of `engine`, updated from its KV events and metrics.

    `wall_offset_ns`: nanoseconds to add to the callers' times for the time since 1970; None if they are times of this
    machine's monotonic clock.
    """

    def __init__(self, engine: ExternalEngine, *, wall_offset_ns: int | None = None) -> None:
        self.tokens = BlockTokens()
        self.num_frames = 0
        """Number of frames created, over all epochs."""
        self.has_started = False
        """Whether there is a cache state to publish."""
        self.restarts = RestartDetector()
        self._engine = engine
        self._wall_offset_ns = wall_offset_ns
        self._slots = CachedRows(clears_lower_tiers=engine.clears_lower_tiers)
        self._totals = ReadingTotals()
        self._reading = EngineReading()
        self._facts = ServerFacts()
        self._has_reading = False
        self._epoch = secrets.randbits(_EPOCH_BITS)
        self._state: CacheState | None = None  # of this epoch; None before its first snapshot
        self._wants_snapshot = False
        self._quality_events = DataQualityEvents()
        self._num_media_reported = 0  # how many of `CachedRows.unknown_media` were reported
        self._other_pending: list[TelemetryMessage] = []
        self._heartbeat_ns = 0

    @property
    def model(self) -> str:
        return self._facts.model or self._reading.model

    def hash_in(self, row: int) -> int:
        """Return the hash of the block in a ledger row, or 0. May be called on any thread, where the result may
        be slightly out of date.
        """
        return self._slots.hash_in_row(row)

    def request_snapshot(self) -> None:
        """Request that `messages` begins with a snapshot when it is called next."""
        self._wants_snapshot = True

    # Input

    def apply_events(self, items: Iterable[StreamItem], now_ns: int) -> None:
        for item in items:
            if isinstance(item, Received):
                self.has_started = True
                self._apply_batch(item.batch, now_ns)
            elif isinstance(item, Gap):
                self._slots.doubt_copies()
                self._quality_events.add(gap_text(item), now_ns)
            elif isinstance(item, Reset) and self._slots.num_held:
                self._forget_blocks()
                self._quality_events.add(f"the cache is reported from the start again: {item.why}", now_ns)

    def apply_reading(self, reading: EngineReading, facts: ServerFacts, now_ns: int, *, are_events_live: bool) -> None:
        """Apply the newest metrics.

        `are_events_live`: whether the cache contents known from KV events are those since the engine's current start.
        """
        was_doubtful = self.restarts.are_doubtful
        before = self._reading if self._has_reading else None
        is_restart, is_other_engine = self.restarts.check(before, reading, now_ns)
        if self.restarts.are_doubtful != was_doubtful:
            self._totals.restart()
            if self.restarts.are_doubtful:
                self._quality_events.add(SEVERAL_ENGINES, now_ns)
            self._begin_epoch()
        elif is_restart:
            self._restart(now_ns, are_events_live=are_events_live)
        elif is_other_engine:  # neither engine has counted the difference between the two readings
            self._totals.restart()
            self._begin_epoch()
        old = self._reading
        has_changed = facts != self._facts or (reading.aborted is None) != (old.aborted is None)
        has_changed |= reading.pool_tokens != old.pool_tokens
        if has_changed and self._state is not None:
            self._begin_epoch()
        self._reading, self._facts, self._has_reading, self.has_started = reading, facts, True, True
        self._learn_sizes()
        if self.restarts.are_doubtful:
            self._totals.skip()
        else:
            self._totals.count(reading)
        self._other_pending = [*self._other_messages(now_ns)]

    def skip_gap(self, text: str, now_ns: int) -> None:
        """Continue after a time without metrics: what was counted meanwhile belongs to no second. `text` is for the
        event that says so.
        """
        self._totals.restart()
        self._has_reading = False
        self._quality_events.add(text, now_ns)
        self._begin_epoch()

    def _apply_batch(self, batch: EventBatch, now_ns: int) -> None:
        slots, tokens = self._slots, self.tokens
        for event in batch.events:
            if isinstance(event, BlockStored):
                tokens.add(event)
            slots.apply(event)
        for medium in slots.unknown_media[self._num_media_reported :]:
            self._quality_events.add(unknown_medium_text(medium), now_ns)
        self._num_media_reported = len(slots.unknown_media)
        if batch.num_unreadable_events:
            count = batch.num_unreadable_events
            self._quality_events.add(
                f"{count} KV events could not be read ({batch.unreadable}) and are missing", now_ns
            )

    def _restart(self, now_ns: int, *, are_events_live: bool) -> None:
        self._totals.restart()
        self._quality_events.add("the engine restarted: its counters went down", now_ns)
        if are_events_live:
            self._begin_epoch()
        else:
            self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._slots, self._num_media_reported = (
            CachedRows(*self._known_sizes(), clears_lower_tiers=self._engine.clears_lower_tiers),
            0,
        )
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch, self._state = secrets.randbits(_EPOCH_BITS), None

    @property
    def _block_size(self) -> int:
        """Block size in tokens. The size in KV events takes precedence, because the server may report another unit."""
        reported = self._slots.groups.block_size or self._reading.block_size or self._facts.block_size
        return min(reported or USUAL_BLOCK_SIZE, MAX_BLOCK_SIZE)

    def _learn_sizes(self) -> None:
        num_hbm, num_host = self._known_sizes()
        if num_hbm and self._slots.shrink(Tier.HBM, num_hbm):
            self._begin_epoch()
        self._slots.reserve(Tier.HBM, num_hbm)
        self._slots.reserve(Tier.HOST, num_host)

    def _known_sizes(self) -> tuple[int, int]:
        """Return the number of blocks in HBM and in host memory, each 0 if unknown."""
        size = self._block_size
        return self._reading.num_blocks or self._facts.num_tokens // size, (self._reading.host_tokens or 0) // size

    # Output

    def messages(self, now_ns: int, *, is_alive: bool) -> list[TelemetryMessage]:
        """Return the messages to publish, in order. `is_alive`: whether the engine has recently answered or
        published; only then a heartbeat is included.
        """
        if not self.has_started:
            return []
        messages: list[TelemetryMessage] = []
        if self._state is not None and (self._slots.must_change or self._have_blocks_changed(self._state)):
            self._begin_epoch()
        if self._state is None or self._wants_snapshot:
            messages.append(self._snapshot(now_ns))
        state = self._state
        assert state is not None, "a snapshot begins it"
        messages += self._frames(state, now_ns)
        messages += self._other_pending
        self._other_pending = []
        if is_alive and now_ns - self._heartbeat_ns >= HEARTBEAT_NS:
            self._heartbeat_ns = now_ns
            messages.append(self._heartbeat(state, now_ns))
        return messages

    def _have_blocks_changed(self, state: CacheState) -> bool:
        size, cache = self._block_size, state.hello.cache
        return (cache.block_size, cache.groups) != (size, self._slots.groups.published(size))

    def _snapshot(self, now_ns: int) -> Snapshot:
        self._wants_snapshot = False
        offset_ns = self._wall_offset_ns
        hello = hello_of(
            self._engine,
            self._epoch,
            now_ns,
            slots=self._slots,
            block_size=self._block_size,
            reading=self._reading,
            facts=self._facts,
            are_counters_known=not self.restarts.are_doubtful,
            wall_offset_ns=time.time_ns() - time.monotonic_ns() if offset_ns is None else offset_ns,
        )
        if self._state is None:
            self._state = CacheState(hello)
            self._slots.lay_out(self._state.ledger)
        self._state.hello = hello
        self._set_totals(self._state)
        return self._state.snapshot(time_ns=now_ns)

    def _frames(self, state: CacheState, now_ns: int) -> Iterator[Frame]:
        """Yield a frame if anything changed, or several if more than `MANY_ROWS` rows changed."""
        ids, columns = self._slots.drain_changes()
        notes = self._quality_events.drain(now_ns)
        if not (ids.size or notes or self._totals.has_news):
            return
        self._set_totals(state)
        for note in notes:
            state.add_event(note)
        is_held, is_on_device = columns["hash"] != 0, ids < state.hello.cache.num_blocks
        state.add_moves("evicted", ids[is_on_device & ~is_held].tolist())
        state.add_moves("saved", ids[is_held & ~is_on_device].tolist())
        for start in range(0, max(ids.size, 1), MANY_ROWS):
            part = slice(start, start + MANY_ROWS)
            state.set_blocks(ids[part], **{name: values[part] for name, values in columns.items()})
            num_prefill, num_decode = self._totals.drain_tokens()
            self.num_frames += 1
            yield state.frame(state.seq + 1, now_ns, num_decode_tokens=num_decode, num_prefill_tokens=num_prefill)

    def _set_totals(self, state: CacheState) -> None:
        stored = self._slots.num_stored
        state.totals |= asdict(self._totals.counters)
        state.totals["evicted_blocks"] = self._slots.num_removed[Tier.HBM]
        state.totals["offloaded_blocks"] = sum(stored[tier] for tier in stored if tier is not Tier.HBM)

    def _other_messages(self, now_ns: int) -> Iterable[TelemetryMessage]:
        """Yield the messages, other than frames, that carry values of the newest metrics."""
        totals = self._totals
        yield Reading(
            epoch=self._epoch,
            time_ns=now_ns,
            used_share=totals.used_share,
            latencies=totals.latencies,
            figures=self._reading.figures,
        )
        memory = breakdown(self._reading, self._epoch, now_ns)
        if memory is not None:
            yield memory

    def _heartbeat(self, state: CacheState, now_ns: int) -> Heartbeat:
        counters = self._totals.counters
        return Heartbeat(
            epoch=self._epoch,
            time_ns=now_ns,
            seq=state.seq,
            step=state.step,
            num_unfinished=counters.num_running + counters.num_waiting,
        )


class DataQualityEvents:
    """Bounded list of events about the quality of the data: gaps, restarts, events that could not be read."""

    def __init__(self) -> None:
        self._quality_events: list[Event] = []
        self._num_omitted = 0

    def add(self, text: str, now_ns: int) -> None:
        if len(self._quality_events) < MAX_NOTES:
            self._quality_events.append(Event(kind="note", time_ns=now_ns, cause=text[:MAX_CHARACTERS]))
        else:
            self._num_omitted += 1

    def drain(self, now_ns: int) -> tuple[Event, ...]:
        notes, self._quality_events = self._quality_events, []
        if self._num_omitted:
            notes.append(Event(kind="note", time_ns=now_ns, cause=f"{self._num_omitted} more notes"))
            self._num_omitted = 0
        return tuple(notes)


def gap_text(gap: Gap) -> str:
    count = gap.last - gap.first + 1
    batches = f"batch {gap.first}" if count == 1 else f"{count} batches, {gap.first} to {gap.last},"
    return (
        f"{batches} of KV events are lost ({gap.why}): until their text is cached again, the page map may show blocks "
        "that are gone and miss others"
    )


def unknown_medium_text(medium: str) -> str:
    return (
        f"KV events report blocks in {medium[:40]!r}, a tier that kvscope does not know: they are shown as an unknown "
        "tier, after the disk"
    )


class RestartDetector:
    """Distinguishes restarts of one engine from several engines that answer at one address, for example behind a load
    balancer.

    The counters of one engine grow, and fall when it restarts. With several engines, counters also jump back up to
    values counted before, and the start times of their processes recur.
    """

    def __init__(self) -> None:
        self.count = 0
        self.are_doubtful = False
        """Whether several engines seem to answer, so that differences of counters are meaningless."""
        self._jumps_ns: list[int] = []
        self._left: EngineReading | None = None  # the last reading before the counters fell
        self._starts_s: set[float] = set()
        self._read_ns = 0

    def check(self, before: EngineReading | None, now: EngineReading, now_ns: int) -> tuple[bool, bool]:
        """Return whether the engine restarted between the readings `before` and `now`, and whether they are of
        different engines.
        """
        passed_ns, self._read_ns = now_ns - self._read_ns, now_ns
        if before is None:
            return False, False
        if before.started_s is not None:
            self._starts_s.add(before.started_s)
        has_fallen = now.is_restart_of(before)
        has_returned = now.started_s != before.started_s and now.started_s in self._starts_s
        has_jumped_up = now.started_s is None and not has_fallen and self._jumps_up(before, now, passed_ns)
        self._jumps_ns = [time_ns for time_ns in self._jumps_ns if now_ns - time_ns < COUNTER_JUMP_WINDOW_NS]
        if has_fallen or has_jumped_up:
            self._jumps_ns.append(now_ns)
        if has_fallen:
            self._left = before
        elif has_jumped_up:
            self._left = None
        is_still_doubtful = self.are_doubtful and bool(self._jumps_ns)
        self.are_doubtful = is_still_doubtful or has_returned or len(self._jumps_ns) > MAX_JUMPS
        is_restart = has_fallen and not self.are_doubtful
        self.count += is_restart
        return is_restart, has_jumped_up and not self.are_doubtful

    def _jumps_up(self, before: EngineReading, now: EngineReading, passed_ns: int) -> bool:
        tokens = [
            later - earlier
            for later, earlier in zip(now.totals[:2], before.totals[:2], strict=True)
            if later is not None and earlier is not None
        ]
        if sum(tokens) > MAX_TOKENS_PER_S * max(passed_ns / 1e9, 1.0):
            return True
        return self._left is not None and _has_reached(now, self._left) and not _has_reached(before, self._left)


def _has_reached(reading: EngineReading, totals_of: EngineReading) -> bool:
    """Return whether each total of `reading` is at least that of `totals_of`."""
    pairs = zip(reading.totals, totals_of.totals, strict=True)
    return all(now >= then for now, then in pairs if now is not None and then is not None)
