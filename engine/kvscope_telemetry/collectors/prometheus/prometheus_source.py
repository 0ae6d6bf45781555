"""Presents an engine that a Prometheus server scrapes as a `Source`: first its past, then its present.

Owns the thread that queries Prometheus. The readings are translated like those of an engine's own metrics page. Present
readings are published one scrape interval late, second by second, because the second between two scrapes is known only
after the later one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from datetime import datetime
from typing import Final

from msgspec.structs import replace as replace_struct

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.http_client import NoAnswer
from kvscope_telemetry.collectors.prometheus.prometheus_address import INSTANCE, PrometheusAddress
from kvscope_telemetry.collectors.prometheus.prometheus_client import LOOKBACK_S, PrometheusClient
from kvscope_telemetry.collectors.prometheus.scrape_steps import SECOND_NS, ScrapeStep, ScrapeSteps
from kvscope_telemetry.collectors.rank_translator import SEVERAL_ENGINES, RankTranslator
from kvscope_telemetry.collectors.scraped_page import Samples, ScrapedPage
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.collectors.update_queue import UpdateQueue
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.source import SourceState, SourceStatus, Update
from kvscope_telemetry.sources.mirrored_source import MirroredSource
from kvscope_telemetry.sources.sink import Sink

TICK_S: Final = 0.25
POLL_S: Final = 2.0
PAUSES_S: Final = (1.0, 30.0)
"""Pause in seconds after the first failed query, and maximum pause. The pause doubles with each failure."""
WINDOW_S: Final = 600
"""Seconds of the past per query."""
SINK_WAIT_S: Final = 10.0
"""Time that the past waits for a sink, which records it. The window sets it after it was painted."""
_MAX_NAMED: Final = 4


class PrometheusSource(MirroredSource):
    """Source for one engine of those that `address` selects, the first by job and instance.

    Args:
        past_s: Seconds of the past to publish first, unless the address says how many.
        sink: Receives all messages.

    Raises BadInput if the certificate file of `address` cannot be used.
    """

    def __init__(
        self,
        address: PrometheusAddress,
        *,
        past_s: int = 0,
        sink: Sink | None = None,
        poll_s: float = POLL_S,
        tick_s: float = TICK_S,
        pauses_s: tuple[float, float] = PAUSES_S,
        sink_wait_s: float = SINK_WAIT_S,
    ) -> None:
        super().__init__(threading.Condition())
        self._address = address
        self.past_s = past_s if address.past_s is None else address.past_s
        """Seconds before the start of this source that it publishes first."""
        self._poll_s, self._tick_s, self._pauses_s, self._sink_wait_s = poll_s, tick_s, pauses_s, sink_wait_s
        self._client = PrometheusClient(address)
        self._updates = UpdateQueue(sink)
        self._has_sink = threading.Event()
        if sink is not None:
            self._has_sink.set()
        self._resync_wanted = False
        self._end = threading.Event()
        self._engine: ScrapedEngine | None = None
        self._others: tuple[str, ...] = ()
        """Instances that the address selects besides the watched one."""
        self._why = f"{address.url('')} has not answered yet"
        self._is_refused = False
        self._failure = ""
        self._past_note = ""
        self._last_message_ns = 0
        self._thread = threading.Thread(target=self._run, name="kvscope-prometheus", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def status(self) -> SourceStatus:
        state, reason = self._state()
        engine = self._engine
        return SourceStatus(
            state=state,
            reason=reason,
            frames_received=0 if engine is None else engine.translator.num_frames,
            frames_dropped=self._updates.num_discarded,
            resyncs=0 if engine is None else engine.translator.restarts.count,
            last_message_ns=self._last_message_ns,
        )

    def poll_update(self) -> Update | None:
        return self._updates.poll_update()

    def resync(self) -> None:
        self._updates.discard()
        self._resync_wanted = True

    def set_sink(self, sink: Sink | None) -> None:
        """Pass subsequent messages, beginning with a snapshot, to `sink`, or to no sink if None."""
        self._updates.set_sink(sink)
        if sink is not None:
            self._has_sink.set()

    def close(self) -> None:
        self._end.set()
        self._has_sink.set()
        self._client.cancel()
        self._thread.join()

    # Source thread

    def _run(self) -> None:
        pause_s = self._pauses_s[0]
        while not self._end.is_set():
            try:
                self._watch()
            except (NoAnswer, ProtocolError) as error:
                self._is_refused = isinstance(error, NoAnswer) and error.is_refusal
                self._why = str(error) if isinstance(error, NoAnswer) else f"{self._address.url('')}: {error}"
            except Exception as error:  # shown in `status`: otherwise a dead source looks like an idle engine
                self._failure = f"reading failed: {error!r:.200}"
                raise
            engine = self._engine
            if engine is not None and engine.has_new_scrapes:
                pause_s, engine.has_new_scrapes = self._pauses_s[0], False
            self._end.wait(pause_s)
            pause_s = min(2 * pause_s, self._pauses_s[1])

    def _watch(self) -> None:
        """Query until `close`. Raises if a query fails; the next call continues where this one ended."""
        offset_ns = self._client.server_time_ns() - time.time_ns()
        if self._engine is None:
            engine = self._choose_engine()
            self._read_past(engine, time.time_ns() + offset_ns)
            self._engine, self._why, self._is_refused = engine, "", False
            self._publish_past(engine, time.time_ns() + offset_ns - engine.delay_ns)
        else:
            engine = self._engine
        poll_at_s = 0.0
        while not self._end.is_set():
            if time.monotonic() >= poll_at_s:
                engine.read_new(self._client, time.time_ns() + offset_ns)
                self._why, self._is_refused = "", False
                poll_at_s = time.monotonic() + self._poll_s
            self._publish(engine, time.time_ns() + offset_ns - engine.delay_ns)
            self._end.wait(self._tick_s)

    def _choose_engine(self) -> ScrapedEngine:
        found = self._client.find_engines(past_s=self.past_s)
        if not found:
            raise ProtocolError(
                f"no engine with {self._address.matchers or 'any job'} was scraped in the last "
                f"{max(self.past_s, LOOKBACK_S) // 60} minutes"
            )
        description, labels = found[0]
        self._others = tuple(each[INSTANCE] for _, each in found[1:])
        return ScrapedEngine(description, labels, self._address.rank)

    def _read_past(self, engine: ScrapedEngine, now_ns: int) -> None:
        """Read the past, and wait for a sink for it. Without a past, only the present state is kept."""
        if not self.past_s:
            engine.read(self._client, LOOKBACK_S, now_ns)
            engine.drop_before(now_ns - engine.delay_ns)
            return
        self._why, self._is_refused = f"reading the last {_duration(self.past_s)} from Prometheus", False
        for until_s in [*range(self.past_s - WINDOW_S, 0, -WINDOW_S), 0]:
            length_s = min(WINDOW_S, self.past_s - until_s)
            engine.read(self._client, length_s, now_ns - until_s * SECOND_NS)
            if self._end.is_set():
                return
        first_ns = engine.first_ns
        if first_ns is None or now_ns - first_ns < self.past_s * SECOND_NS - 2 * engine.steps.interval_ns:
            since = "no data" if first_ns is None else f"data since {datetime.fromtimestamp(first_ns / 1e9):%H:%M:%S}"
            self._past_note = f"Prometheus has {since} of the {_duration(self.past_s)} asked for"
        self._has_sink.wait(self._sink_wait_s)

    def _publish(self, engine: ScrapedEngine, until_ns: int) -> None:
        """Publish the steps up to `until_ns`."""
        translator = engine.translator
        if self._updates.wants_snapshot(time.monotonic_ns()) or self._resync_wanted:
            self._resync_wanted = False
            translator.request_snapshot()
        messages = self._messages(engine, until_ns)
        if messages:
            self._updates.enqueue(messages)
            self._notify()

    def _publish_past(self, engine: ScrapedEngine, until_ns: int) -> None:
        self._updates.begin_pass()
        self._updates.enqueue_past(self._messages(engine, until_ns))
        self._notify()

    def _messages(self, engine: ScrapedEngine, until_ns: int) -> list[TelemetryMessage]:
        messages: list[TelemetryMessage] = []
        while engine.pending and engine.pending[0].time_ns <= until_ns and not self._end.is_set():
            messages += engine.next_messages()
        return messages

    def _notify(self) -> None:
        self._last_message_ns = time.monotonic_ns()
        with self._changed:
            self._changed.notify_all()

    # Status

    def _state(self) -> tuple[SourceState, str]:
        if self._failure:
            return SourceState.ENDED, self._failure
        if self._is_refused:
            return SourceState.REFUSED, self._why
        engine = self._engine
        if engine is None or not engine.translator.has_started:
            return SourceState.CONNECTING, self._why
        if self._why:
            return SourceState.STALE, self._why
        interval_s = engine.steps.interval_ns / SECOND_NS
        if not engine.pending:
            last = datetime.fromtimestamp(engine.steps.last_ns / 1e9)
            return SourceState.STALE, f"the last scrape in Prometheus is from {last:%H:%M:%S}"
        texts = [f"from Prometheus, which scrapes every {interval_s:.3g} s", self._others_text(engine), self._past_note]
        if engine.translator.restarts.are_doubtful:
            texts.append(SEVERAL_ENGINES)
        return SourceState.LIVE, "; ".join(filter(None, texts))

    def _others_text(self, engine: ScrapedEngine) -> str:
        if not self._others:
            return ""
        shown = engine.labels[INSTANCE]
        more = "" if len(self._others) <= _MAX_NAMED else f" and {len(self._others) - _MAX_NAMED} more"
        return (
            f"{shown} is shown, and not {', '.join(self._others[:_MAX_NAMED])}{more}; for all: kvscope fleet "
            f"'{self._address.name}'"
        )


class ScrapedEngine:
    """Scrapes of one engine that were read and not published yet, and the translator that publishes them."""

    def __init__(self, engine: ExternalEngine, labels: dict[str, str], rank: int | None) -> None:
        self.labels = labels
        self.steps = ScrapeSteps()
        self.pending: deque[ScrapeStep] = deque()
        self.first_ns: int | None = None
        """Time of the first scrape that was read; None before it."""
        self.has_new_scrapes = False
        self._asked_ns = 0
        """Time up to which `read_new` has asked for all scrapes; 0 before its first complete read."""
        self._engine, self._rank = engine, rank
        # Prometheus knows metrics only: no prompts can be sent through it, and no KV events are known.
        capabilities = replace_struct(engine.capabilities, completions=False, token_ids=False)
        self.translator = RankTranslator(replace(engine, capabilities=capabilities), wall_offset_ns=0)

    @property
    def delay_ns(self) -> int:
        """How much later than it happened a second is published: a scrape interval, and time to read the scrape."""
        return round(1.2 * self.steps.interval_ns) + round(2 * POLL_S * SECOND_NS)

    def read_new(self, client: PrometheusClient, now_ns: int) -> None:
        """Read the scrapes since the last one, as far as they were not asked for already."""
        # A scrape may be stored later than others of its time, but not by more than the lookback.
        since_ns = max(self.steps.last_ns, self._asked_ns - LOOKBACK_S * SECOND_NS) or now_ns - LOOKBACK_S * SECOND_NS
        seconds = (now_ns - since_ns) // SECOND_NS + 1
        while seconds > WINDOW_S:  # after a time without answers
            seconds -= WINDOW_S
            self.read(client, WINDOW_S, now_ns - seconds * SECOND_NS)
        self.read(client, int(seconds), now_ns)
        self._asked_ns = now_ns

    def read(self, client: PrometheusClient, seconds: int, until_ns: int) -> None:
        scrapes = client.scrapes(self._engine, self.labels, seconds=seconds, until_ns=until_ns)
        new = [(time_ns, samples) for time_ns, samples in scrapes if time_ns > self.steps.last_ns]
        if not new:
            return
        self.has_new_scrapes = True
        self.first_ns = new[0][0] if self.first_ns is None else self.first_ns
        self.steps.learn_interval([*([self.steps.last_ns] if self.steps.last_ns else []), *[each for each, _ in new]])
        for time_ns, samples in new:
            page = self._page(samples)
            if page.has(self._engine.metrics_prefix):
                self.pending.extend(self.steps.add(time_ns, self._engine.read_metrics(page)))

    def drop_before(self, time_ns: int) -> None:
        """Drop the pending steps before `time_ns`, except the last one."""
        while len(self.pending) > 1 and self.pending[1].time_ns <= time_ns:
            self.pending.popleft()

    def next_messages(self) -> list[TelemetryMessage]:
        step, translator = self.pending.popleft(), self.translator
        if step.gap_ns:
            translator.skip_gap(_gap_text(step), step.time_ns)
        translator.apply_reading(step.reading, ServerFacts(), step.time_ns, are_events_live=False)
        return translator.messages(step.time_ns, is_alive=True)

    def _page(self, samples: Samples) -> ScrapedPage:
        engine = self._engine
        return ScrapedPage(samples, rank=(engine.rank_label, self._rank), replicas=engine.replica_labels)


def _gap_text(step: ScrapeStep) -> str:
    end = datetime.fromtimestamp(step.time_ns / 1e9)
    begin = datetime.fromtimestamp((step.time_ns - step.gap_ns) / 1e9)
    return f"Prometheus has no scrape between {begin:%H:%M:%S} and {end:%H:%M:%S}: what was counted then is left out"


def _duration(seconds: int) -> str:
    return (
        f"{seconds // 3600} h" if seconds % 3600 == 0 else f"{seconds // 60} min" if seconds >= 120 else f"{seconds} s"
    )
