"""Tests of engines in Prometheus: past and present, gaps, restarts, several engines, authentication, failures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.telemetry.collectors.pages import VllmPage
from tests.telemetry.collectors.prometheus.fake_prometheus import FakePrometheus

from kvscope_telemetry.collectors.prometheus import prometheus_source
from kvscope_telemetry.collectors.prometheus.prometheus_address import PrometheusAddress
from kvscope_telemetry.collectors.prometheus.prometheus_client import PrometheusClient
from kvscope_telemetry.collectors.prometheus.prometheus_source import PrometheusSource, ScrapedEngine
from kvscope_telemetry.collectors.prometheus.scrape_steps import SECOND_NS
from kvscope_telemetry.messages.telemetry import Frame, Reading, Snapshot, TelemetryMessage
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.source import SourceState

WAIT_S = 60.0
INTERVAL_S = 15
TOKENS_PER_SCRAPE = 150
UNTIL_LATER = range(60, -121, -INTERVAL_S)
"""Seconds ago of scrapes that go on during the test, so that the source stays live however slow the test is."""


Kind = TypeVar("Kind")


class MessageList:
    """Sink that keeps all messages."""

    failure = ""

    def __init__(self) -> None:
        self.messages: list[TelemetryMessage] = []

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        self.messages.append(message)
        return True

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.messages if isinstance(message, kind)]


@pytest.fixture
def fake() -> Iterator[FakePrometheus]:
    made = FakePrometheus()
    yield made
    made.close()


@pytest.fixture
def watch(fake: FakePrometheus) -> Iterator[Callable[..., PrometheusSource]]:
    """Function that opens a source on `fake`, with further options of the address: `watch("&instance=a")`."""
    made: list[PrometheusSource] = []

    def start(options: str = "", *, api_key: str = "", sink: object = None, past_s: int = 0) -> PrometheusSource:
        address = PrometheusAddress.parse(f"prometheus://127.0.0.1:{fake.port}?job=vllm{options}", api_key=api_key)
        made.append(
            PrometheusSource(
                address,
                past_s=past_s,
                sink=sink,  # type: ignore[arg-type]
                poll_s=0.02,
                tick_s=0.01,
                pauses_s=(0.02, 0.1),
                sink_wait_s=0.0,
            )
        )
        return made[-1]

    yield start
    for each in made:
        each.close()


def scrape_engine(
    fake: FakePrometheus, seconds_ago: range, *, page: VllmPage | None = None, instance: str = "gpu1:8000"
) -> VllmPage:
    """Scrape an engine that generates 10 tokens per second and has a growing number of running requests, at each of
    `seconds_ago`.
    """
    page, now_s = page or VllmPage(), fake.now_s
    for number, ago in enumerate(seconds_ago):
        page.count("generation_tokens", TOKENS_PER_SCRAPE)
        page.count("prompt_tokens", 30)
        page.gauge("num_requests_running", number)
        page.gauge("kv_cache_usage_perc", 0.5)
        fake.scrape(page.text(), now_s - ago, instance=instance)
    return page


def wait_until(source: PrometheusSource, condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, source.status
        source.update_mirror()
        time.sleep(0.005)


def wait_for_state(source: PrometheusSource, state: SourceState) -> str:
    wait_until(source, lambda: source.status.state == state)
    return source.status.reason


def test_present_state_is_that_of_the_last_scrape_before_the_delay(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource]
) -> None:
    scrape_engine(fake, range(120, -121, -INTERVAL_S))
    source = watch()
    wait_until(source, lambda: source.mirror.hello)
    counters, hello = source.mirror.counters, source.mirror.hello
    assert hello is not None
    assert (hello.model.name, hello.cache.num_blocks, hello.capabilities.completions) == ("m", 64, False)
    assert counters.num_running in (6, 7)
    assert TOKENS_PER_SCRAPE * 6 < counters.generation_tokens <= TOKENS_PER_SCRAPE * 8
    assert source.mirror.used_share == 0.5
    assert "from Prometheus, which scrapes every 15 s" in wait_for_state(source, SourceState.LIVE)


@pytest.mark.parametrize("clock_offset_s", [0.0, 7200.0])
def test_past_is_published_with_gauges_of_each_scrape_and_evenly_growing_counters(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource], clock_offset_s: float
) -> None:
    fake.clock_offset_s = clock_offset_s
    scrape_engine(fake, range(300, -1, -INTERVAL_S))
    start_s = min(values[0][0] for values in fake.series.values())
    sink = MessageList()
    source = watch(sink=sink, past_s=310)
    wait_until(source, lambda: len(sink.of(Reading)) > 250)
    (snapshot,) = sink.of(Snapshot)
    assert abs(snapshot.hello.wall_time_ns / 1e9 - start_s) < 5
    frames = sink.of(Frame)
    growth = [
        later.counters.generation_tokens - frame.counters.generation_tokens
        for frame, later in itertools.pairwise(frames)
    ]
    assert set(growth) <= {9, 10, 11}
    for frame in frames:
        number = (frame.time_ns / 1e9 - start_s) / INTERVAL_S
        assert frame.counters.num_running in (int(number - 0.1), int(number + 0.1))


def test_past_fills_the_overview_of_a_recording(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource], tmp_path: Path
) -> None:
    scrape_engine(fake, range(300, -1, -INTERVAL_S))
    with RecordingWriter(tmp_path / "run.mcap") as writer:
        source = watch(sink=writer, past_s=310)
        wait_until(source, lambda: source.status.frames_received > 250)
        source.close()
    overview = read_overview(Recording.open(tmp_path / "run.mcap"))
    seconds = overview.time_ns[1:-1]
    assert len(seconds) > 200
    assert set(overview.column("decode_tokens")[1:-1]) <= {0.0, 9.0, 10.0, 11.0, 20.0}


def test_gap_between_scrapes_is_left_out_and_reported(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource]
) -> None:
    page = scrape_engine(fake, range(600, 400, -INTERVAL_S))
    scrape_engine(fake, range(200, -1, -INTERVAL_S), page=page)
    sink = MessageList()
    source = watch(sink=sink, past_s=700)
    wait_until(source, lambda: len(sink.of(Reading)) > 300)
    times_s = [message.time_ns / 1e9 - fake.now_s for message in sink.of(Reading)]
    assert not [each for each in times_s if -390 < each < -215]
    causes = [event.cause for frame in sink.of(Frame) for event in frame.events]
    assert [cause.partition(" between")[0] for cause in causes] == ["Prometheus has no scrape"]
    assert len(sink.of(Snapshot)) == 2


def test_gap_among_the_first_scrapes_is_a_gap(fake: FakePrometheus, watch: Callable[..., PrometheusSource]) -> None:
    page = scrape_engine(fake, range(300, 299, -INTERVAL_S))
    scrape_engine(fake, range(60, 44, -INTERVAL_S), page=page)
    sink = MessageList()
    source = watch(sink=sink, past_s=310)
    wait_until(source, lambda: len(sink.of(Snapshot)) > 1)
    (cause,) = [event.cause for frame in sink.of(Frame) for event in frame.events]
    assert cause.startswith("Prometheus has no scrape between")


def test_counters_that_restart_are_an_engine_restart(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource]
) -> None:
    scrape_engine(fake, range(300, 150, -INTERVAL_S))
    scrape_engine(fake, range(150, -1, -INTERVAL_S))
    sink = MessageList()
    source = watch(sink=sink, past_s=310)
    wait_until(source, lambda: len(sink.of(Snapshot)) > 1)
    assert source.status.resyncs == 1
    causes = [event.cause for frame in sink.of(Frame) for event in frame.events]
    assert causes == ["the engine restarted: its counters went down"]


def test_first_of_several_engines_is_shown_and_the_others_are_named(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource]
) -> None:
    for instance in ("gpu2:8000", "gpu1:8000"):
        scrape_engine(fake, UNTIL_LATER, instance=instance)
    reason = wait_for_state(watch(), SourceState.LIVE)
    assert "gpu1:8000 is shown, and not gpu2:8000; for all: kvscope fleet 'prometheus://" in reason
    assert "is shown" not in wait_for_state(watch("&instance=gpu2:8000"), SourceState.LIVE)


def test_past_beyond_the_retention_is_reported(fake: FakePrometheus, watch: Callable[..., PrometheusSource]) -> None:
    scrape_engine(fake, range(300, -121, -INTERVAL_S))
    reason = wait_for_state(watch("&past=6h"), SourceState.LIVE)
    assert "Prometheus has data since" in reason
    assert "of the 6 h asked for" in reason


def test_missing_engine_is_named_by_its_labels(fake: FakePrometheus, watch: Callable[..., PrometheusSource]) -> None:
    source = watch()
    wait_until(source, lambda: "no engine" in source.status.reason)
    assert source.status.state == SourceState.CONNECTING
    assert 'no engine with job="vllm" was scraped in the last 5 minutes' in source.status.reason


@pytest.mark.parametrize(("key", "header"), [("secret", "Bearer secret"), ("me:pass", "Basic bWU6cGFzcw==")])
def test_key_is_sent_as_token_or_as_name_and_password(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource], key: str, header: str
) -> None:
    fake.authorization = header
    scrape_engine(fake, UNTIL_LATER)
    assert "needs an API key: use --api-key-file (HTTP 401)" in wait_for_state(watch(), SourceState.REFUSED)
    wait_for_state(watch(api_key=key), SourceState.LIVE)


def test_source_goes_on_after_prometheus_was_away(fake: FakePrometheus, watch: Callable[..., PrometheusSource]) -> None:
    scrape_engine(fake, UNTIL_LATER)
    source = watch()
    wait_for_state(source, SourceState.LIVE)
    fake.is_failing = True
    reason = wait_for_state(source, SourceState.STALE)
    assert reason == f"http://127.0.0.1:{fake.port}/api/v1/query answers with HTTP 503"
    fake.is_failing = False
    wait_for_state(source, SourceState.LIVE)


def test_engine_that_is_no_longer_scraped_is_stale(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource]
) -> None:
    scrape_engine(fake, range(290, 100, -INTERVAL_S))
    assert "the last scrape in Prometheus is from" in wait_for_state(watch(), SourceState.STALE)


def test_time_without_scrapes_is_asked_for_only_once(fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_source, "WINDOW_S", 500)
    scrape_engine(fake, range(7200, 7100, -INTERVAL_S))
    client = PrometheusClient(PrometheusAddress.parse(f"prometheus://127.0.0.1:{fake.port}"))
    ((description, labels),) = client.find_engines(past_s=7300)
    engine = ScrapedEngine(description, labels, None)
    now_ns = round(fake.now_s * 1e9)
    engine.read(client, 300, now_ns - 7000 * SECOND_NS)
    engine.read_new(client, now_ns)
    num_queries = fake.num_queries
    engine.read_new(client, now_ns + 2 * SECOND_NS)
    assert fake.num_queries == num_queries + 1


def test_running_engine_is_shown_rather_than_one_that_was_scraped_before(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource]
) -> None:
    scrape_engine(fake, range(3300, 3000, -INTERVAL_S), instance="gpu0:8000")
    scrape_engine(fake, UNTIL_LATER)
    source = watch(past_s=3600)
    wait_for_state(source, SourceState.LIVE)  # that of gpu0 would be stale


def test_past_is_read_in_windows(
    fake: FakePrometheus, watch: Callable[..., PrometheusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_source, "WINDOW_S", 70)
    scrape_engine(fake, range(300, -1, -INTERVAL_S))
    sink = MessageList()
    source = watch(sink=sink, past_s=310)
    wait_until(source, lambda: len(sink.of(Reading)) > 250)
    assert len(sink.of(Snapshot)) == 1
