"""KV events and readings of another engine into our messages, so that all who know these need not know it.

Owns the epoch, the number of frames, and when the whole state is told anew. Knows no sockets and no clock: `now_ns` is
given, this machine's monotonic one.

An epoch is a life of what is shown, not of the engine: it ends where the engine started anew, where its cache was told
from the beginning again, and where the ledger gets another shape or the engine another name. For within an epoch a
snapshot says nothing that frames did not: who is up to date skips it, and a number that it alone had would be a frame
that was lost. Shapes double, so there are few.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Final

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
    CacheInfo,
    Counters,
    Event,
    Frame,
    Heartbeat,
    Hello,
    Moves,
    Reading,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE

MAX_RESTARTS: Final = 3
WITHIN_NS: Final = 60_000_000_000
"""An engine does not start more often in so long."""
MAX_NOTES: Final = 32
"""Between two frames; of more the last says how many were left out."""
MAX_LETTERS: Final = 500
HEARTBEAT_NS: Final = 500_000_000
MANY_ROWS: Final = 400_000
"""In a frame at most: a message has a bound."""
USUAL_BLOCK_SIZE: Final = 16
"""Until a block was told of, where the server does not say."""
_EPOCH_BITS: Final = 62


class Translator:
    """Of one rank of `engine`. Give it what comes, then ask it what is to be told."""

    def __init__(self, engine: ExternalEngine) -> None:
        self.tokens = BlockTokens()
        self.seq = 0
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
        self._hello: Hello | None = None  # of this epoch, None before its first snapshot
        self._wants_snapshot = True
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
        if self._has_reading and reading.is_restart_of(self._reading):
            self._restart(now_ns, are_events_live=are_events_live)
        was = self._reading
        is_other = facts != self._facts or (reading.aborted is None) != (was.aborted is None)
        is_other |= reading.pool_tokens != was.pool_tokens
        if is_other and self._hello is not None:
            self._begin_epoch()
        self._reading, self._facts, self._has_reading, self.has_begun = reading, facts, True, True
        self._learn_sizes()
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
        if self.restarts.is_one(now_ns):
            self._notes.add("the engine restarted: its counters went down", now_ns)
            if are_events_live:
                self._begin_epoch()
            else:
                self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._slots, self._num_media_told = Slots(*self._known_sizes()), 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch, self._hello, self.seq = secrets.randbits(_EPOCH_BITS), None, 0
        self._slots.write_changes()  # its snapshot has them
        self._wants_snapshot = True

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
        if self._slots.must_change:
            self._slots.lay_out()
            self._begin_epoch()
        elif self._hello is not None and self._are_blocks_other(self._hello.cache):
            self._begin_epoch()
        if self._wants_snapshot:
            messages.append(self._snapshot(now_ns))
        messages += self._frames(now_ns)
        messages += self._others
        self._others = []
        if is_heard and now_ns - self._beat_ns >= HEARTBEAT_NS:
            self._beat_ns = now_ns
            messages.append(self._heartbeat(now_ns))
        return messages

    def _are_blocks_other(self, told: CacheInfo) -> bool:
        """Whether they have another size, or there are other groups of them, than was told."""
        size = self._block_size
        return (told.block_size, told.groups) != (size, self._slots.groups.told(size))

    def _snapshot(self, now_ns: int) -> Snapshot:
        self._wants_snapshot = False
        self._hello = hello_of(
            self._engine,
            self._epoch,
            now_ns,
            slots=self._slots,
            block_size=self._block_size,
            reading=self._reading,
            facts=self._facts,
        )
        return Snapshot(
            hello=self._hello,
            seq=self.seq,
            step=self.seq,
            time_ns=now_ns,
            blocks=self._slots.ledger.pack_all(),
            counters=self._counters(),
        )

    def _frames(self, now_ns: int) -> Iterator[Frame]:
        """One where something changed; where very much did, several."""
        changes = self._slots.write_changes()
        notes = self._notes.take(now_ns)
        moves = Moves(evicted=changes.evicted.tobytes(), saved=changes.saved.tobytes())
        if not (changes.ids.size or notes or self._tallies.has_news):
            return
        for start in range(0, max(changes.ids.size, 1), MANY_ROWS):
            self.seq += 1
            self.num_frames += 1
            yield Frame(
                epoch=self._epoch,
                seq=self.seq,
                step=self.seq,
                time_ns=now_ns,
                blocks=self._slots.ledger.pack(changes.ids[start : start + MANY_ROWS]),
                batch=self._tallies.take_batch(),
                counters=self._counters(),
                events=notes,
                moves=moves,
            )
            notes, moves = (), Moves()

    def _counters(self) -> Counters:
        return self._tallies.with_blocks(
            evicted=self._slots.num_removed[Tier.HBM],
            offloaded=sum(number for tier, number in self._slots.num_stored.items() if tier is not Tier.HBM),
        )

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

    def _heartbeat(self, now_ns: int) -> Heartbeat:
        counters = self._tallies.counters
        return Heartbeat(
            epoch=self._epoch,
            time_ns=now_ns,
            seq=self.seq,
            step=self.seq,
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
    """Whether counters that went down mean that an engine started anew, or that several are behind one address.

    Tell it each time that counters went down.
    """

    def __init__(self) -> None:
        self.count = 0
        self._times_ns: list[int] = []

    @property
    def are_doubtful(self) -> bool:
        """Whether the counters go down so often that no engine's restarts explain it."""
        return len(self._times_ns) > MAX_RESTARTS

    def is_one(self, now_ns: int) -> bool:
        """Whether what happened now is to be believed."""
        self._times_ns = [time_ns for time_ns in self._times_ns if now_ns - time_ns < WITHIN_NS]
        self._times_ns.append(now_ns)
        self.count += not self.are_doubtful
        return not self.are_doubtful
