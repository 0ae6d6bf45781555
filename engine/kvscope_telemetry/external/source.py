"""A running engine of another kind as a `Source`: its KV events and metrics, as updates, over its restarts.

Owns the thread that brings the two together. Each of them has one of its own; what they say means is the translator's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.external.address import ExternalAddress, waits_for_publisher
from kvscope_telemetry.external.block_contents import BlockContents
from kvscope_telemetry.external.prompted_source import PromptedSource
from kvscope_telemetry.external.readings import EngineReading
from kvscope_telemetry.external.scrape import Scraper
from kvscope_telemetry.external.server_facts import ServerFacts
from kvscope_telemetry.external.translator import SEVERAL_ENGINES, RankTranslator
from kvscope_telemetry.kv_events.stream import KvEventStream
from kvscope_telemetry.kv_events.stream_items import Reset, StreamItem, StreamState, StreamStatus
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.sink import Sink

RETRY_S: Final = 5.0
"""For an endpoint that could not be had."""
_Where = tuple[str, str, str]
FRAME_S: Final = 0.1
"""Between frames, where something changes."""
HEARD_NS: Final = 3_000_000_000
"""A sign of life from either part is worth so long."""
SILENT_NS: Final = 60_000_000_000
"""Without a KV event while tokens flow."""
FLOWING_TOKENS: Final = 1_000
"""That many in that time fill blocks."""
WAIT_FOR_METRICS_NS: Final = 3_000_000_000


class ExternalSource(PromptedSource):
    """The engine at `address`, one rank of it; a context manager that closes at the end.

    Nobody needs to be there yet. `sink` is given all that is told (`set_sink`). Raises BadInput for a file of
    certificates that will not do.
    """

    def __init__(
        self,
        address: ExternalAddress,
        *,
        sink: Sink | None = None,
        frame_s: float = FRAME_S,
        scraper: Callable[[ExternalAddress], Scraper] = Scraper,
    ) -> None:
        super().__init__(address, sink)
        self._frame_s = frame_s
        self._translator = RankTranslator(address.engine)
        tokens, hash_in = self._translator.tokens, self._translator.hash_in
        self._contents = BlockContents(tokens, hash_in, address.tokenizer)
        self._heard_ns = self._num_batches = 0
        self._silence = Silence()
        self._begun_ns = time.monotonic_ns()
        self._failure = self._inside = ""
        self._scraper = scraper(address)
        self._events = EventPart(address)
        self._thread = threading.Thread(target=self._run, name="kvscope-external", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The address, without its options."""
        return self._address.name

    @property
    def status(self) -> SourceStatus:
        """How it is now: the worse of metrics and KV events."""
        events = self._events.status
        state, reason = self._standing(events)
        stream = events or StreamStatus()
        return SourceStatus(
            state=state,
            reason=reason,
            frames_received=self._translator.num_frames,
            frames_dropped=self._hand_over.num_discarded,
            resyncs=self._translator.restarts.count,
            messages_rejected=stream.num_unreadable + stream.num_of_other_ranks,
            num_skipped=stream.num_unknown_events,
            last_message_ns=self._heard_ns,
            adapters=self._prompter.adapters,
        )

    def contents(self, rows: Iterable[int]) -> tuple[BlockContent, ...]:
        """What rows of the ledger hold now, as far as it was told, in the order asked. From any thread.

        Text is by the tokenizer where it is on this machine, which the first call reads; else the tokens' numbers.
        """
        return self._contents.of_rows(rows, self._translator.model)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._end.wait(self._frame_s):
                self._pass(time.monotonic_ns())
        except Exception as error:  # told in the status: a source that died silently looks like a quiet one
            self._failure = f"reading failed: {error!r:.200}"
            raise
        finally:
            self._events.close()
            self._scraper.close()

    def _pass(self, now_ns: int) -> None:
        translator = self._translator
        scraped = self._scraper.take_scraped()
        if scraped is not None:
            self._events.learn(scraped.facts)
            self._inside = scraped.reading.inside
            self._silence.look(scraped.reading, self._num_batches, now_ns)
            translator.read(scraped.reading, scraped.facts, now_ns, are_events_live=self._events.is_live)
        if self._may_take_events(now_ns):
            translator.apply_events(self._events.take_items(), now_ns)
        if self._hand_over.wants_snapshot(now_ns) or self._resync_wanted:
            self._resync_wanted = False
            translator.restate()
        self._note_life(now_ns, is_scraped=scraped is not None)
        messages = translator.messages(now_ns, is_heard=now_ns - self._heard_ns < HEARD_NS)
        if messages:
            self._hand_over.give(messages)
            with self._changed:
                self._changed.notify_all()

    def _may_take_events(self, now_ns: int) -> bool:
        """They wait a little where metrics have not come yet, which say how many blocks there are."""
        return self._translator.has_begun or now_ns - self._begun_ns >= WAIT_FOR_METRICS_NS

    def _note_life(self, now_ns: int, *, is_scraped: bool) -> None:
        events = self._events.status
        num_batches = 0 if events is None else events.num_batches
        if is_scraped or num_batches != self._num_batches:
            self._heard_ns = now_ns
        self._num_batches = num_batches

    def _standing(self, events: StreamStatus | None) -> tuple[SourceState, str]:
        if self._failure:
            return SourceState.ENDED, self._failure
        return status_of_parts(
            AttachedParts(
                product=self._address.engine.name,
                metrics_why=self._scraper.why,
                is_refused=self._scraper.is_refused,
                events=events,
                events_failure=self._events.failure,
                has_begun=self._translator.has_begun,
                are_restarts_doubtful=self._translator.restarts.are_doubtful,
                events_option=self._address.engine.events_option,
                are_events_missing=self._silence.is_told,
                inside=self._inside,
            )
        )


@dataclass(frozen=True, slots=True)
class AttachedParts:
    """How an attached engine is, in one state and one sentence: the worst of its two parts, metrics and KV events.

    What is known of both at one moment.
    """

    product: str
    """The engine, as a person calls it."""
    metrics_why: str
    """Why there are none; empty while there are."""
    is_refused: bool
    events: StreamStatus | None
    """None where no endpoint is known."""
    events_failure: str
    """Why their endpoint cannot be used; empty while it can."""
    has_begun: bool
    """Whether there is a state to show."""
    are_restarts_doubtful: bool = False
    events_option: str = ""
    """With which its server reports them."""
    are_events_missing: bool = False
    """Tokens flow, and none comes."""
    inside: str = ""
    """Where it is told from inside, too."""


def status_of_parts(parts: AttachedParts) -> tuple[SourceState, str]:
    """State, and why in words; empty where all is well and known."""
    state, why = _state_of_parts(parts)
    inside = f"seen from outside; for the rest: kvscope --attach {parts.inside}" if parts.inside else ""
    return state, _joined(inside, why)


def _state_of_parts(parts: AttachedParts) -> tuple[SourceState, str]:
    metrics, events = parts.metrics_why, _events_why(parts)
    if parts.is_refused:
        return SourceState.REFUSED, metrics
    if not parts.has_begun:
        return SourceState.CONNECTING, _joined(metrics, events if parts.events is not None else "")
    if metrics and events:
        return SourceState.STALE, _joined(metrics, events)
    if metrics:
        return SourceState.STALE, f"{metrics}; KV events go on" if parts.events is not None else metrics
    if _are_events_gone(parts):
        return SourceState.STALE, f"{events}; metrics go on"
    if parts.are_restarts_doubtful:
        return SourceState.LIVE, _joined(SEVERAL_ENGINES, events)
    return SourceState.LIVE, events


def _are_events_gone(parts: AttachedParts) -> bool:
    return bool(parts.events_failure) or (parts.events is not None and parts.events.state is StreamState.LOST)


def _events_why(parts: AttachedParts) -> str:
    """What a person must know of them; empty where they are live."""
    events = parts.events
    if parts.events_failure:
        return f"KV events: {parts.events_failure}"
    if events is None:
        return (
            f"no KV events: {parts.product} does not say where they are, and none was given (--kv-events "
            "tcp://HOST:5557), so that which blocks are cached is not known" + _start_with(parts)
        )
    if parts.are_events_missing and events.state in (StreamState.LIVE, StreamState.JOINING):
        return "tokens flow and no KV event came in 60 s" + _start_with(parts) + ", prefix caching on"
    if events.state is StreamState.UNCERTAIN:
        return f"what is cached is uncertain: {events.why}"
    if events.state is StreamState.REPLAYING:
        return f"what was cached before is being asked for: {events.why}"
    if events.state is StreamState.JOINING and not events.why.startswith("nothing published"):
        return f"KV events: {events.why}"
    return f"KV events: {events.why}" if events.state is StreamState.LOST else ""


def _start_with(parts: AttachedParts) -> str:
    return f": start the server with {parts.events_option}" if parts.events_option else ""


class Silence:
    """Whether KV events are missing: tokens flow, and none has come for a minute. Told of each reading."""

    def __init__(self) -> None:
        self.is_told = False
        self._num_batches = 0
        self._since: tuple[int, int] | None = None
        """When it began, and how many tokens there had been."""

    def look(self, reading: EngineReading, num_batches: int, now_ns: int) -> None:
        """So many batches of events have come."""
        known = [each for each in (reading.prompt_tokens, reading.generation_tokens) if each is not None]
        num_tokens = int(sum(known))
        if num_batches != self._num_batches or self._since is None or num_tokens < self._since[1]:
            self._num_batches, self._since, self.is_told = num_batches, (now_ns, num_tokens), False
            return
        since_ns, before = self._since
        self.is_told = now_ns - since_ns >= SILENT_NS and num_tokens - before >= FLOWING_TOKENS


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


class EventPart:
    """The KV events of an attached engine: the stream, wherever the server says that they are now.

    Owns the stream and when it is opened anew. Belongs to one thread, but for `status`.

    Of the rank at `address`: from the endpoint in it, or else from where the server says.
    """

    def __init__(self, address: ExternalAddress) -> None:
        self.failure = ""
        """Why the endpoint cannot be used, empty while it can."""
        self._address = address
        self._stream: KvEventStream | None = None
        self._where: _Where = ("", "", "")
        self._retry_s = 0.0
        self._moved: list[StreamItem] = []
        if address.kv_events:
            self._open(address.kv_events, address.replay, address.topic)

    @property
    def status(self) -> StreamStatus | None:
        """How the stream is; None where there is none."""
        return None if self._stream is None else self._stream.status

    @property
    def is_live(self) -> bool:
        """Whether what was given is what is."""
        return self._stream is not None and self._stream.status.state is StreamState.LIVE

    def learn(self, facts: ServerFacts) -> None:
        """What the server says; a server that no longer says it leaves the stream as it is."""
        if not self._address.kv_events and facts.kv_events:
            self._open(facts.kv_events, facts.replay, self._address.topic or facts.topic)

    def take_items(self) -> list[StreamItem]:
        """What came since the last call, in order."""
        if self.failure and time.monotonic() >= self._retry_s:
            self._open(*self._where)
        moved, self._moved = self._moved, []
        return moved if self._stream is None else [*moved, *self._stream.take_items()]

    def close(self) -> None:
        """Stop reading. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self, endpoint: str, replay: str, topic: str) -> None:
        where = (endpoint, replay, topic)
        if self._stream is not None:
            if where == self._where:
                return
            self.close()
            self._moved.append(Reset(f"KV events are at {endpoint} now"))
        self._where, self.failure = where, ""
        address = self._address
        try:
            self._stream = KvEventStream(
                address.endpoint(endpoint),
                address.endpoint(replay) if replay else None,
                topic=topic,
                bind=waits_for_publisher(endpoint),
            )
        except KvscopeError as error:
            self.failure, self._retry_s = str(error), time.monotonic() + RETRY_S
