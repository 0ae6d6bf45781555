"""Presents a running vLLM or SGLang engine as a `Source`: merges its KV events and metrics, across its restarts.

Owns the thread that merges the two. KV events and metrics are received on a separate thread each and interpreted by
`rank_translator`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.collectors.block_contents import BlockContents
from kvscope_telemetry.collectors.external_address import ExternalAddress, waits_for_publisher
from kvscope_telemetry.collectors.prompted_source import PromptedSource
from kvscope_telemetry.collectors.rank_translator import SEVERAL_ENGINES, RankTranslator
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.scrape import Scraper
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.kv_events.event_stream import KvEventStream
from kvscope_telemetry.kv_events.stream_items import Reset, StreamItem, StreamState, StreamStatus
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.sink import Sink

RETRY_S: Final = 5.0
"""Seconds between attempts to open a KV event endpoint."""
_EventEndpoints = tuple[str, str, str]
FRAME_S: Final = 0.1
"""Seconds between two runs of the merging thread's loop. A frame is published only if something changed."""
ALIVE_NS: Final = 3_000_000_000
"""Time in ns for which the engine counts as alive after a scrape or a batch of KV events."""
SILENT_NS: Final = 60_000_000_000
"""Time in ns without a KV event, while tokens are computed, after which events are reported missing."""
FLOWING_TOKENS: Final = 1_000
"""Number of tokens that must be computed within `SILENT_NS` without a KV event before events are reported
missing. So many tokens fill at least one block, for which the engine should have published an event.
"""
WAIT_FOR_METRICS_NS: Final = 3_000_000_000


class ExternalSource(PromptedSource):
    """Source for one data-parallel rank of the engine at `address`. As a context manager, it closes itself on exit.

    The engine may start later. `sink` receives all messages (`set_sink`). Raises BadInput if the certificate file of
    `address` cannot be used.
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
        self._last_sign_ns = self._num_batches = 0
        self._silence = MissingEventsDetector()
        self._started_ns = time.monotonic_ns()
        self._failure = self._inside = ""
        self._scraper = scraper(address)
        self._events = EventPart(address)
        self._thread = threading.Thread(target=self._run, name="kvscope-external", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def status(self) -> SourceStatus:
        """Current status, which is the worse one of the status of the metrics and that of the KV events."""
        events = self._events.status
        state, reason = self._overall_status(events)
        stream = events or StreamStatus()
        return SourceStatus(
            state=state,
            reason=reason,
            frames_received=self._translator.num_frames,
            frames_dropped=self._updates.num_discarded,
            resyncs=self._translator.restarts.count,
            messages_rejected=stream.num_unreadable + stream.num_malformed,
            num_skipped=stream.num_unknown_events,
            last_message_ns=self._last_sign_ns,
            adapters=self._prompter.adapters,
        )

    def contents(self, rows: Iterable[int]) -> tuple[BlockContent, ...]:
        """Return the contents of ledger rows, in the order of `rows`, as far as KV events reported them. Thread-safe.

        Contents are text if the model's tokenizer is on this machine (loaded by the first call), else token ids.
        """
        return self._contents.of_rows(rows, self._translator.model)

    # Source thread

    def _run(self) -> None:
        try:
            while not self._end.wait(self._frame_s):
                self._update(time.monotonic_ns())
        except Exception as error:  # shown in `status`: otherwise a dead source looks like an idle engine
            self._failure = f"reading failed: {error!r:.200}"
            raise
        finally:
            self._events.close()
            self._scraper.close()

    def _update(self, now_ns: int) -> None:
        translator = self._translator
        scraped = self._scraper.poll_result()
        if scraped is not None:
            self._events.learn(scraped.facts)
            self._inside = scraped.reading.inside
            self._silence.update(scraped.reading, self._num_batches, now_ns)
            translator.apply_reading(scraped.reading, scraped.facts, now_ns, are_events_live=self._events.is_live)
        if self._can_apply_events(now_ns):
            translator.apply_events(self._events.poll_items(), now_ns)
        if self._updates.wants_snapshot(now_ns) or self._resync_wanted:
            self._resync_wanted = False
            translator.request_snapshot()
        self._record_sign(now_ns, is_scraped=scraped is not None)
        messages = translator.messages(now_ns, is_alive=now_ns - self._last_sign_ns < ALIVE_NS)
        if messages:
            self._updates.enqueue(messages)
            with self._changed:
                self._changed.notify_all()

    def _can_apply_events(self, now_ns: int) -> bool:
        """Return whether KV events may be applied. They are held back until the first metrics, which give the
        number of blocks, have arrived, or for `WAIT_FOR_METRICS_NS` at most.
        """
        return self._translator.has_started or now_ns - self._started_ns >= WAIT_FOR_METRICS_NS

    def _record_sign(self, now_ns: int, *, is_scraped: bool) -> None:
        events = self._events.status
        num_batches = 0 if events is None else events.num_batches
        if is_scraped or num_batches != self._num_batches:
            self._last_sign_ns = now_ns
        self._num_batches = num_batches

    def _overall_status(self, events: StreamStatus | None) -> tuple[SourceState, str]:
        if self._failure:
            return SourceState.ENDED, self._failure
        return status_of_parts(
            AttachedParts(
                product=self._address.engine.name,
                metrics_why=self._scraper.why,
                is_refused=self._scraper.is_refused,
                events=events,
                events_failure=self._events.failure,
                has_started=self._translator.has_started,
                are_restarts_doubtful=self._translator.restarts.are_doubtful,
                events_option=self._address.engine.events_option,
                are_events_missing=self._silence.is_reported,
                inside=self._inside,
                other_topic_address=self._other_topic_address(events),
                ranks_address="" if self._address.names_rank else self._ranks_address(),
            )
        )

    def _other_topic_address(self, events: StreamStatus | None) -> str:
        topics = () if events is None else events.ambiguous_topics
        return str(replace(self._address, topic=topics[1])) if topics else ""

    def _ranks_address(self) -> str:
        """Return the address of all ranks of the server; empty if it has a single one."""
        count, address = self._scraper.num_ranks, str(self._address)
        return f"{address}{'&' if '?' in address else '/?'}ranks={count}" if count > 1 else ""


@dataclass(frozen=True, slots=True)
class AttachedParts:
    """State of an attached engine at one moment: its metrics and its KV events."""

    product: str
    metrics_why: str
    """Reason why there are no metrics; empty if there are."""
    is_refused: bool
    events: StreamStatus | None
    """Status of the KV event stream; None if no endpoint is known."""
    events_failure: str
    """Reason why the KV event endpoint cannot be used; empty if it can."""
    has_started: bool
    are_restarts_doubtful: bool = False
    events_option: str = ""
    are_events_missing: bool = False
    """Whether tokens are computed but no KV event arrives."""
    inside: str = ""
    """Address at which kvscope's plugin inside the engine publishes telemetry; empty if there is none."""
    ranks_address: str = ""
    """Address of all data-parallel ranks, if the server has several and the user's address names none."""
    other_topic_address: str = ""
    """Address with the topic of another publisher of KV events, if it is unknown which of several is meant."""


def status_of_parts(parts: AttachedParts) -> tuple[SourceState, str]:
    """Return the overall state and its reason as text. The reason is empty if there is no problem."""
    state, why = _state_of_parts(parts)
    inside = f"seen from outside; for the rest: kvscope --attach {parts.inside}" if parts.inside else ""
    topics = _topics_text(parts.events, parts.other_topic_address)
    ranks = f"one of several ranks; for all: kvscope --attach '{parts.ranks_address}'" if parts.ranks_address else ""
    return state, _join_reasons(inside, topics, ranks, why)


def _topics_text(events: StreamStatus | None, other_address: str) -> str:
    """Return which of several publishers is shown, and how to choose another; empty if that is clear."""
    if events is None or not events.ambiguous_topics:
        return ""
    shown, *others = events.ambiguous_topics
    return (
        f"several engines publish KV events here: {shown} is shown, and not {', '.join(others)}; for one of these: "
        f"kvscope --attach '{other_address}'"
    )


def _state_of_parts(parts: AttachedParts) -> tuple[SourceState, str]:
    metrics, events = parts.metrics_why, _events_why(parts)
    if parts.is_refused:
        return SourceState.REFUSED, metrics
    if not parts.has_started:
        return SourceState.CONNECTING, _join_reasons(metrics, events if parts.events is not None else "")
    if metrics and events:
        return SourceState.STALE, _join_reasons(metrics, events)
    if metrics:
        return SourceState.STALE, f"{metrics}; KV events still arrive" if parts.events is not None else metrics
    if _are_events_gone(parts):
        return SourceState.STALE, f"{events}; metrics still arrive"
    if parts.are_restarts_doubtful:
        return SourceState.LIVE, _join_reasons(SEVERAL_ENGINES, events)
    return SourceState.LIVE, events


def _are_events_gone(parts: AttachedParts) -> bool:
    return bool(parts.events_failure) or (parts.events is not None and parts.events.state is StreamState.LOST)


def _events_why(parts: AttachedParts) -> str:
    events = parts.events
    if parts.events_failure:
        return f"KV events: {parts.events_failure}"
    if events is None:
        return (
            f"no KV events: {parts.product} does not report their endpoint, and none was given (--kv-events "
            "tcp://HOST:5557), so it is unknown which blocks are cached" + _start_advice(parts)
        )
    if parts.are_events_missing and events.state in (StreamState.LIVE, StreamState.JOINING):
        return "tokens are generated, but no KV event arrived for 60 s" + _start_advice(parts) + ", prefix caching on"
    if events.state is StreamState.UNCERTAIN:
        return f"what is cached is uncertain: {events.why}"
    if events.state is StreamState.REPLAYING:
        return f"what was cached before is being asked for: {events.why}"
    if events.state is StreamState.JOINING and not events.why.startswith("nothing published"):
        return f"KV events: {events.why}"
    return f"KV events: {events.why}" if events.state is StreamState.LOST else ""


def _start_advice(parts: AttachedParts) -> str:
    return f": start the server with {parts.events_option}" if parts.events_option else ""


class MissingEventsDetector:
    """Detects missing KV events: `FLOWING_TOKENS` were computed within `SILENT_NS`, and no event arrived."""

    def __init__(self) -> None:
        self.is_reported = False
        self._num_batches = 0
        self._since: tuple[int, int] | None = None
        """Monotonic time of the last KV event in ns, and the engine's number of computed tokens at that time."""

    def update(self, reading: EngineReading, num_batches: int, now_ns: int) -> None:
        """Process new metrics. `num_batches`: batches of KV events received so far."""
        known = [each for each in (reading.prompt_tokens, reading.generation_tokens) if each is not None]
        num_tokens = int(sum(known))
        if num_batches != self._num_batches or self._since is None or num_tokens < self._since[1]:
            self._num_batches, self._since, self.is_reported = num_batches, (now_ns, num_tokens), False
            return
        since_ns, num_tokens_before = self._since
        self.is_reported = now_ns - since_ns >= SILENT_NS and num_tokens - num_tokens_before >= FLOWING_TOKENS


def _join_reasons(*parts: str) -> str:
    return "; ".join(filter(None, parts))


class EventPart:
    """KV event stream of an attached engine. It is reopened if the server reports another endpoint.

    The endpoint in `address` is used if there is one, otherwise the one that the server reports. Not thread-safe,
    except for `status`.
    """

    def __init__(self, address: ExternalAddress) -> None:
        self.failure = ""
        self._address = address
        self._stream: KvEventStream | None = None
        self._endpoints: _EventEndpoints = ("", "", "")
        self._retry_s = 0.0
        self._resets: list[StreamItem] = []
        if address.kv_events:
            self._open(address.kv_events, address.replay, address.topic)

    @property
    def status(self) -> StreamStatus | None:
        return None if self._stream is None else self._stream.status

    @property
    def is_live(self) -> bool:
        """Whether the received KV events describe the current contents of the cache."""
        return self._stream is not None and self._stream.status.state is StreamState.LIVE

    def learn(self, facts: ServerFacts) -> None:
        """Open the endpoint that the server reports. The stream stays open if the server no longer reports an
        endpoint.
        """
        if not self._address.kv_events and facts.kv_events:
            self._open(facts.kv_events, facts.replay, self._address.topic or facts.topic)

    def poll_items(self) -> list[StreamItem]:
        """Return and clear the items of the KV event stream received since the last call, in order."""
        if self.failure and time.monotonic() >= self._retry_s:
            self._open(*self._endpoints)
        resets, self._resets = self._resets, []
        return resets if self._stream is None else [*resets, *self._stream.poll_items()]

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self, endpoint: str, replay: str, topic: str) -> None:
        endpoints = (endpoint, replay, topic)
        if self._stream is not None:
            if endpoints == self._endpoints:
                return
            self.close()
            self._resets.append(Reset(f"KV events are at {endpoint} now"))
        self._endpoints, self.failure = endpoints, ""
        address = self._address
        try:
            self._stream = KvEventStream(
                address.endpoint(endpoint),
                address.endpoint(replay) if replay else None,
                topic=topic,
                publisher_host=address.host,
                bind=waits_for_publisher(endpoint),
            )
        except KvscopeError as error:
            self.failure, self._retry_s = str(error), time.monotonic() + RETRY_S
