"""KV events and readings of another engine into a `CacheState`, whose frames all others know.

Owns the epoch, its state, and when the whole state is told anew. Knows no sockets and no clock: `now_ns` is given, this
machine's monotonic one.

An epoch is a life of what is shown, not of the engine: it ends where the engine started anew, where its cache was told
from the beginning again, and where the ledger gets another shape or the engine another name. For within an epoch a
snapshot says nothing that frames did not: who is up to date skips it, and a number that it alone had would be a frame
that was lost. Shapes double, so there are few.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import asdict

from kvscope_telemetry.external.block_tokens import BlockTokens
from kvscope_telemetry.external.engine import ExternalEngine
from kvscope_telemetry.external.hello import hello_of
from kvscope_telemetry.external.readings import EngineReading
from kvscope_telemetry.external.server_facts import ServerFacts
from kvscope_telemetry.external.slots import Slots
from kvscope_telemetry.external.tallies import Tallies, breakdown
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
from kvscope_telemetry.state.cache_state import CacheState

MAX_JUMPS: Final = 2
WITHIN_NS: Final = 60_000_000_000
"""An engine's counters do not jump more often in so long: it restarts, and does not return to what it had counted."""
MAX_TOKENS_PER_S: Final = 5_000_000
"""More are not computed by one engine: the counters are another's."""
SEVERAL_ENGINES: Final = "its counters go up and down: are several engines behind this address?"
MAX_NOTES: Final = 32
"""Between two frames; of more the last says how many were left out."""
MAX_LETTERS: Final = 500
HEARTBEAT_NS: Final = 500_000_000
MANY_ROWS: Final = 400_000
"""In a frame at most: a message has a bound."""
USUAL_BLOCK_SIZE: Final = 16
"""Until a block was told of, where the server does not say."""
_EPOCH_BITS: Final = 62


class RankTranslator:
    """Applies the KV events and metric readings of one rank of `engine` to a `CacheState`, and returns its frames."""

    def __init__(self, engine: ExternalEngine) -> None:
        self.tokens = BlockTokens()
        self.num_frames = 0
        """Over all epochs."""
        self.has_begun = False
        """Whether there is a state to speak of."""
        self.restarts = Restarts()
        self._engine = engine
        self._slots = Slots()
        self._tallies = Tallies()
        self._reading = EngineReading()
        self._facts = ServerFacts()
        self._has_reading = False
        self._epoch = secrets.randbits(_EPOCH_BITS)
        self._state: CacheState | None = None  # of this epoch, None before its first snapshot
        self._wants_snapshot = False
        self._notes = Notes()
        self._num_media_told = 0  # of `Slots.unknown_media`
        self._others: list[TelemetryMessage] = []
        self._beat_ns = 0

    @property
    def model(self) -> str:
        """As the server calls it, empty where it does not."""
        return self._facts.model or self._reading.model

    def hash_in(self, row: int) -> int:
        """What is in a row, 0 for nothing. For any thread, which may see the state a moment late."""
        return self._slots.holds(row)

    def restate(self) -> None:
        """Tell the whole state anew."""
        self._wants_snapshot = True

    # What comes

    def apply_events(self, items: Iterable[StreamItem], now_ns: int) -> None:
        """Of the stream of KV events, in order."""
        for item in items:
            if isinstance(item, Received):
                self.has_begun = True
                self._take_batch(item.batch, now_ns)
            elif isinstance(item, Gap):
                self._slots.doubt_copies()
                self._notes.add(gap_words(item), now_ns)
            elif isinstance(item, Reset) and self._slots.num_held:
                self._forget_blocks()
                self._notes.add(f"the cache is reported from the start again: {item.why}", now_ns)

    def read(self, reading: EngineReading, facts: ServerFacts, now_ns: int, *, are_events_live: bool) -> None:
        """The newest metrics. `are_events_live`: whether what is cached is known to be that of this engine start."""
        was_doubtful = self.restarts.are_doubtful
        before = self._reading if self._has_reading else None
        is_restart, is_of_another = self.restarts.judge(before, reading, now_ns)
        if self.restarts.are_doubtful != was_doubtful:
            self._tallies.restart()
            if self.restarts.are_doubtful:
                self._notes.add(SEVERAL_ENGINES, now_ns)
            self._begin_epoch()
        elif is_restart:
            self._restart(now_ns, are_events_live=are_events_live)
        elif is_of_another:  # what the two differ by was counted by neither
            self._tallies.restart()
            self._begin_epoch()
        was = self._reading
        is_other = facts != self._facts or (reading.aborted is None) != (was.aborted is None)
        is_other |= reading.pool_tokens != was.pool_tokens
        if is_other and self._state is not None:
            self._begin_epoch()
        self._reading, self._facts, self._has_reading, self.has_begun = reading, facts, True, True
        self._learn_sizes()
        if self.restarts.are_doubtful:
            self._tallies.skip()
        else:
            self._tallies.count(reading)
        self._others = [*self._said_of(now_ns)]

    def _take_batch(self, batch: EventBatch, now_ns: int) -> None:
        slots, tokens = self._slots, self.tokens
        for event in batch.events:
            if isinstance(event, BlockStored):
                tokens.add(event)
            slots.apply(event)
        for medium in slots.unknown_media[self._num_media_told :]:
            self._notes.add(unknown_medium_words(medium), now_ns)
        self._num_media_told = len(slots.unknown_media)
        if batch.num_unreadable_events:
            count = batch.num_unreadable_events
            self._notes.add(f"{count} KV events could not be read ({batch.unreadable}) and are missing", now_ns)

    def _restart(self, now_ns: int, *, are_events_live: bool) -> None:
        self._tallies.restart()
        self._notes.add("the engine restarted: its counters went down", now_ns)
        if are_events_live:
            self._begin_epoch()
        else:
            self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._slots, self._num_media_told = Slots(*self._known_sizes()), 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch, self._state = secrets.randbits(_EPOCH_BITS), None

    @property
    def _block_size(self) -> int:
        """That of blocks which were told of: a server may name another unit."""
        told = self._slots.groups.block_size or self._reading.block_size or self._facts.block_size
        return min(told or USUAL_BLOCK_SIZE, MAX_BLOCK_SIZE)

    def _learn_sizes(self) -> None:
        num_hbm, num_host = self._known_sizes()
        if num_hbm and self._slots.shrink(Tier.HBM, num_hbm):
            self._begin_epoch()
        self._slots.want(Tier.HBM, num_hbm)
        self._slots.want(Tier.HOST, num_host)

    def _known_sizes(self) -> tuple[int, int]:
        """Blocks of HBM and of host memory, 0 for what is not known."""
        size = self._block_size
        return self._reading.num_blocks or self._facts.num_tokens // size, (self._reading.host_tokens or 0) // size

    # What is to be told

    def messages(self, now_ns: int, *, is_heard: bool) -> list[TelemetryMessage]:
        """In order. `is_heard`: whether the engine gave a sign of life lately."""
        if not self.has_begun:
            return []
        messages: list[TelemetryMessage] = []
        if self._state is not None and (self._slots.must_change or self._are_blocks_other(self._state)):
            self._begin_epoch()
        if self._state is None or self._wants_snapshot:
            messages.append(self._snapshot(now_ns))
        state = self._state
        assert state is not None, "a snapshot begins it"
        messages += self._frames(state, now_ns)
        messages += self._others
        self._others = []
        if is_heard and now_ns - self._beat_ns >= HEARTBEAT_NS:
            self._beat_ns = now_ns
            messages.append(self._heartbeat(state, now_ns))
        return messages

    def _are_blocks_other(self, state: CacheState) -> bool:
        """Whether they have another size, or there are other groups of them, than was told."""
        size, cache = self._block_size, state.hello.cache
        return (cache.block_size, cache.groups) != (size, self._slots.groups.told(size))

    def _snapshot(self, now_ns: int) -> Snapshot:
        self._wants_snapshot = False
        hello = hello_of(
            self._engine,
            self._epoch,
            now_ns,
            slots=self._slots,
            block_size=self._block_size,
            reading=self._reading,
            facts=self._facts,
            are_counters_known=not self.restarts.are_doubtful,
        )
        if self._state is None:
            self._state = CacheState(hello)
            self._slots.lay_out(self._state.ledger)
        self._state.hello = hello
        self._set_totals(self._state)
        return self._state.snapshot(time_ns=now_ns)

    def _frames(self, state: CacheState, now_ns: int) -> Iterator[Frame]:
        """One where something changed; where very much did, several."""
        ids, columns = self._slots.take_changes()
        notes = self._notes.take(now_ns)
        if not (ids.size or notes or self._tallies.has_news):
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
            num_prefill, num_decode = self._tallies.take_tokens()
            self.num_frames += 1
            yield state.frame(state.seq + 1, now_ns, num_decode_tokens=num_decode, num_prefill_tokens=num_prefill)

    def _set_totals(self, state: CacheState) -> None:
        """Copy what metrics count, and count what KV events say."""
        stored = self._slots.num_stored
        state.totals |= asdict(self._tallies.counters)
        state.totals["evicted_blocks"] = self._slots.num_removed[Tier.HBM]
        state.totals["offloaded_blocks"] = sum(stored[tier] for tier in stored if tier is not Tier.HBM)

    def _said_of(self, now_ns: int) -> Iterable[TelemetryMessage]:
        """What the newest reading says that frames cannot."""
        tallies = self._tallies
        yield Reading(
            epoch=self._epoch,
            time_ns=now_ns,
            used_share=tallies.used_share,
            latencies=tallies.latencies,
            figures=self._reading.figures,
        )
        memory = breakdown(self._reading, self._epoch, now_ns)
        if memory is not None:
            yield memory

    def _heartbeat(self, state: CacheState, now_ns: int) -> Heartbeat:
        counters = self._tallies.counters
        return Heartbeat(
            epoch=self._epoch,
            time_ns=now_ns,
            seq=state.seq,
            step=state.step,
            num_unfinished=counters.num_running + counters.num_waiting,
        )


class Notes:
    """What happened to the picture itself, as events a person reads: gaps, restarts, what could not be read.

    `add` them, then `take` them into a frame.
    """

    def __init__(self) -> None:
        self._notes: list[Event] = []
        self._num_left_out = 0

    def add(self, words: str, now_ns: int) -> None:
        """Something that a person should know."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append(Event(kind="note", time_ns=now_ns, cause=words[:MAX_LETTERS]))
        else:
            self._num_left_out += 1

    def take(self, now_ns: int) -> tuple[Event, ...]:
        """All since the last call."""
        notes, self._notes = self._notes, []
        if self._num_left_out:
            notes.append(Event(kind="note", time_ns=now_ns, cause=f"{self._num_left_out} more notes"))
            self._num_left_out = 0
        return tuple(notes)


def gap_words(gap: Gap) -> str:
    """What a hole in the stream means."""
    count = gap.last - gap.first + 1
    which = f"batch {gap.first}" if count == 1 else f"{count} batches, {gap.first} to {gap.last},"
    return (
        f"{which} of KV events cannot be had ({gap.why}): "
        "blocks may be shown that are gone, and others not be shown, until their text comes again"
    )


def unknown_medium_words(medium: str) -> str:
    """Where blocks of a medium are shown whose name says nothing."""
    return (
        f"KV events tell of blocks in {medium[:40]!r}, a place that kvscope does not know: "
        "they are shown in an unknown tier, after those on disk"
    )


class Restarts:
    """Tells the restarts of one engine from several engines that answer at one address, as behind a load balancer.

    One engine's counters grow, and fall when it restarts. Counters of several engines also jump back up to what was
    counted before, and their processes' start times come back.
    """

    def __init__(self) -> None:
        self.count = 0
        self.are_doubtful = False
        """Whether several engines seem to answer, so that nothing follows from their counters."""
        self._jumps_ns: list[int] = []
        self._left: EngineReading | None = None  # what was counted before the counters last fell
        self._starts_s: set[float] = set()
        self._read_ns = 0

    def judge(self, before: EngineReading | None, now: EngineReading, now_ns: int) -> tuple[bool, bool]:
        """Return whether the engine restarted between two readings, and whether they are of different engines."""
        passed_ns, self._read_ns = now_ns - self._read_ns, now_ns
        if before is None:
            return False, False
        if before.started_s is not None:
            self._starts_s.add(before.started_s)
        has_fallen = now.is_restart_of(before)
        comes_back = now.started_s != before.started_s and now.started_s in self._starts_s
        is_up = now.started_s is None and not has_fallen and self._jumps_up(before, now, passed_ns)
        self._jumps_ns = [time_ns for time_ns in self._jumps_ns if now_ns - time_ns < WITHIN_NS]
        if has_fallen or is_up:
            self._jumps_ns.append(now_ns)
        if has_fallen:
            self._left = before
        elif is_up:
            self._left = None
        is_still_doubtful = self.are_doubtful and bool(self._jumps_ns)
        self.are_doubtful = is_still_doubtful or comes_back or len(self._jumps_ns) > MAX_JUMPS
        is_restart = has_fallen and not self.are_doubtful
        self.count += is_restart
        return is_restart, is_up and not self.are_doubtful

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
    """Whether each of the totals is as large as the other reading's."""
    pairs = zip(reading.totals, totals_of.totals, strict=True)
    return all(now >= then for now, then in pairs if now is not None and then is not None)
