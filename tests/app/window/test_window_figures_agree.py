"""Tests that all views of a window show the same values for the same time, equal to those of the recording.

`FIGURES` lists each figure with the views that show it. Values are read from widgets, paused after playing, after a
seek, after a step of one frame, at the end, and live. Expected values come from `Recording.state_at` and from `digest`,
from which reports are made. To add a figure that another view shows, add the view to its entry. The speed of a running
answer, which recordings do not contain, is compared between the console and the request table at the end.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from PySide6.QtCore import Qt

from kvscope_app.alarms.alarm_dialog import RuleRow
from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import count, num_bytes, percent, plural, seconds, short
from kvscope_app.window.main_window import MainWindow
from kvscope_telemetry.alarms.rules import Rule
from kvscope_telemetry.exports.run_summary import summarize_run
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Accepted, Submit, Tokens
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Frame,
    Heartbeat,
    Hello,
    ModelInfo,
    Snapshot,
    TelemetryMessage,
    Timings,
)
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.pool_use import pool_use
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.producer.cache_state import CacheState
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import hybrid_recording, sample_recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.source import SourceState, SourceStatus, Update
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

WAIT_S = 60.0
RECENT_S = 10
NOT_KNOWN = "–"
VIEWS = ("throughput", "memory", "heatmap", "requests")
RANGES = ("30 s", "All", "1 min")


@dataclass(frozen=True)
class Moment:
    """State shown in a window, and the values that the recording has for it."""

    window: MainWindow
    mirror: Mirror
    recent: dict[str, float | None]
    """Figures of a report of the last ten whole seconds; empty in a live session."""

    @property
    def pool(self) -> dict[str, int]:
        """Return the number of blocks by state, counted in the ledger."""
        states = self.mirror.ledger.state[: self.mirror.num_blocks]
        kinds = {"active": BlockState.ACTIVE, "cached": BlockState.CACHED, "free": BlockState.FREE}
        return {name: int(np.count_nonzero(states == kind)) for name, kind in kinds.items()}

    def legend(self, panel: str, curve: str) -> str:
        """Return the headline of a throughput chart."""
        charts = self.window.views["throughput"].charts
        return charts.panels[panel].legend.values.get(curve, "not shown") if panel in charts.shown else "not shown"

    def memory_chart(self, curve: str) -> str:
        charts = self.window.views["memory"].charts
        return charts.panels["KV pool"].legend.values.get(curve, "not shown") if charts.isVisible() else "not shown"

    def details(self, name: str) -> str:
        """Return the value of a row in the Memory view's table of the KV pool."""
        rows = self.window.views["memory"].details.rows
        return rows[name][1].text() if name in rows else "not shown"

    def part(self, key: str) -> str:
        table = self.window.views["memory"].table
        return table.value(key) if key in table.rows else "not there yet"

    def fragmentation(self, name: str) -> str:
        """Return the value next to a curve of the fragmentation strips, which need the overview of a live session."""
        view = self.window.views["heatmap"]
        return getattr(view.strips, name).value_text if view.strips.internal.isVisible() else "not shown"

    def usage_bar(self, word: str) -> str:
        found = re.search(rf"([^,]*) {word}", self.window.page_map.usage.toolTip())
        return found[1].strip() if found else "not shown"

    def map_summary(self, word: str) -> str:
        """Return a count in the text above the page map."""
        words = self.window.page_map.summary.text().split("  ·  ")
        return next((part.removesuffix(f" {word}") for part in words if part.endswith(f" {word}")), "not shown")

    def requests_line(self) -> list[str]:
        """Return the parts of the text above the request table, such as "39 requests" and "7 running"."""
        return self.window.views["requests"].count.text().split(", ")

    def listed(self, word: str) -> str:
        """Return the number of requests in a state from the text above the request table."""
        parts = self.requests_line()
        return next((part.removesuffix(f" {word}") for part in parts if part.endswith(f" {word}")), "0")

    def alarm(self, expression: str) -> str:
        """Return the alarm dialog's text for the current value of a figure."""
        row = RuleRow(Rule(name="asked", expression=expression), self.window.themes.theme)
        row.show_value(self.window.alarms)
        return row.shown_value


Read = Callable[[Moment], str]


@dataclass(frozen=True)
class ComparedFigure:
    """Figure with its expected value and the views that show it."""

    name: str
    expected: Read
    views: dict[str, Read]
    live: bool = True
    """Whether the figure is also compared in a live session, which has no recorded rates to compare with."""


def share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else NOT_KNOWN


def pool_share(state: str) -> Read:
    return lambda at: share(at.pool[state], sum(at.pool.values()))


def pool_bytes(state: str) -> Read:
    return lambda at: num_bytes(at.pool[state] * at.mirror.hello.cache.block_bytes)


def of_pool(make: Callable[[object], object], text: Callable[[object], str]) -> Read:
    def read(at: Moment) -> str:
        value = make(pool_use(at.mirror))
        return NOT_KNOWN if value is None else text(value)

    return read


def slots(name: str) -> Read:
    def read(at: Moment) -> str:
        use = pool_use(at.mirror)
        part = getattr(use, name)
        return f"{count(part)} ({percent(part / use.num_held)})" if use.num_held else count(part)

    return read


def recent(key: str, text: Callable[[float], str], scale: float = 1.0) -> Read:
    def read(at: Moment) -> str:
        value = at.recent[key]
        return NOT_KNOWN if value is None else text(round(value * scale, 6))

    return read


def nothing_as_dash(read: Read, nothing: str) -> Read:
    return lambda at: NOT_KNOWN if read(at) == nothing else read(at)


def headline(panel: str, curve: str) -> dict[str, Read]:
    return {"Throughput": lambda at: at.legend(panel, curve)}


def latency(panel: str, key: str, percentile: int) -> ComparedFigure:
    name = f"{panel}_p{percentile}_s"
    return ComparedFigure(
        f"{key}, p{percentile}", recent(f"{key}_p{percentile}_s", seconds), headline(panel, name), live=False
    )


def rate(key: str, panel: str, curve: str, unit: str, scale: float = 1.0) -> ComparedFigure:
    return ComparedFigure(key, recent(key, lambda v: f"{short(v)}{unit}", scale), headline(panel, curve), live=False)


def longest_run(at: Moment) -> str:
    use, size = pool_use(at.mirror), at.mirror.hello.cache.block_size
    return plural(use.largest_free_run // size, "block")


def last_second(name: str, column: str) -> ComparedFigure:
    """Return a figure of alarms, which is that of the last whole second."""

    def expected(at: Moment) -> str:
        overview, cursor_ns = at.window.session.overview, at.window.session.timeline.cursor_ns
        place = int(np.searchsorted(overview.time_ns + SECOND_NS, cursor_ns + 1, "right")) - 1
        value = float(overview.column(column)[place]) if place >= 0 else float("nan")
        return "last second: unknown" if np.isnan(value) else f"last second: {value:,.0f}"

    def shown(at: Moment) -> str:
        return at.alarm(f"{name} > 1").replace(" requests", "").replace(" blocks", "")

    return ComparedFigure(f"{name}, last second", expected, {"alarms": shown}, live=False)


FIGURES = (
    ComparedFigure(
        "usage",
        pool_share("active"),
        {"Throughput": lambda at: at.legend("kv", "active"), "page map": lambda at: at.usage_bar("active")},
    ),
    ComparedFigure(
        "cached share",
        pool_share("cached"),
        {"Throughput": lambda at: at.legend("kv", "cached"), "page map": lambda at: at.usage_bar("cached")},
    ),
    ComparedFigure("free share", pool_share("free"), {"page map": lambda at: at.usage_bar("free")}),
    ComparedFigure(
        "active blocks", lambda at: count(at.pool["active"]), {"page map": lambda at: at.map_summary("active")}
    ),
    ComparedFigure(
        "cached blocks", lambda at: count(at.pool["cached"]), {"page map": lambda at: at.map_summary("cached")}
    ),
    ComparedFigure("free blocks", lambda at: count(at.pool["free"]), {"page map": lambda at: at.map_summary("free")}),
    ComparedFigure(
        "bytes in use",
        pool_bytes("active"),
        {"Memory": lambda at: at.part("kv_active"), "Memory's chart": lambda at: at.memory_chart("active_blocks")},
    ),
    ComparedFigure(
        "bytes cached",
        pool_bytes("cached"),
        {"Memory": lambda at: at.part("kv_cached"), "Memory's chart": lambda at: at.memory_chart("cached_blocks")},
    ),
    ComparedFigure(
        "running requests",
        lambda at: short(at.mirror.counters.num_running),
        headline("requests", "num_running") | {"Requests": lambda at: at.listed("running")},
    ),
    ComparedFigure(
        "waiting requests",
        lambda at: short(at.mirror.counters.num_waiting),
        headline("requests", "num_waiting"),
    ),
    ComparedFigure(
        "requests of the whole recording",
        lambda at: plural(round(at.recent["num_requests"]), "request"),
        {"Requests": lambda at: at.requests_line()[0]},
        live=False,
    ),
    ComparedFigure(
        "internal fragmentation",
        of_pool(lambda use: use.internal_fragmentation, percent),
        {
            "Memory": nothing_as_dash(lambda at: at.details("Internal fragmentation"), "nothing in use"),
            "Fragmentation": lambda at: at.fragmentation("internal"),
        },
    ),
    ComparedFigure(
        "external fragmentation",
        of_pool(lambda use: use.external_fragmentation, percent),
        {
            "Memory": nothing_as_dash(lambda at: at.details("External fragmentation"), "no free blocks"),
            "Fragmentation": lambda at: at.fragmentation("external"),
        },
    ),
    ComparedFigure("longest free run", longest_run, {"Fragmentation": lambda at: at.fragmentation("longest")}),
    ComparedFigure(
        "largest free run, slots",
        of_pool(lambda use: use, lambda use: f"{count(use.largest_free_run)} of {count(use.num_free)}"),
        {"Memory": lambda at: at.details("Largest free run")},
    ),
    ComparedFigure("slots used", slots("num_used"), {"Memory": lambda at: at.details("  used")}),
    ComparedFigure("slots wasted", slots("num_wasted"), {"Memory": lambda at: at.details("  wasted")}),
    ComparedFigure(
        "evicted blocks",
        lambda at: plural(at.mirror.counters.evicted_blocks, "block"),
        {"Memory": lambda at: at.details("Evicted")},
    ),
    ComparedFigure(
        "preemptions",
        lambda at: f"{count(at.mirror.counters.preemptions)} ×",
        {"Memory": lambda at: at.details("Preempted")},
    ),
    rate("decode_tokens_per_s", "decode", "decode_tokens", " tok/s"),
    rate("prefill_tokens_per_s", "prefill", "prefill_tokens", " tok/s"),
    rate("evicted_blocks_per_min", "evicted", "evicted_blocks", "/s", 1 / 60),
    ComparedFigure("hit rate", recent("hit_rate", percent), headline("hits", "hit_share"), live=False),
    *(latency(panel, key, p) for panel, key in (("ttft", "first_token"), ("itl", "inter_token")) for p in (50, 95)),
    latency("queue", "queued", 50),
    last_second("running", "num_running"),
    last_second("active_blocks", "active_blocks"),
)


def is_same(said: str, expected: str) -> bool:
    """Whether two texts show the same value; a value between two roundings may be shown as either."""
    if said == expected:
        return True
    numbers = [re.fullmatch(r"([\d.]+)(\D*)", text) for text in (said, expected)]
    if not all(numbers) or numbers[0][2] != numbers[1][2]:
        return False
    digits = [len(number[1].partition(".")[2]) for number in numbers]
    tolerance = 1.001 * 10.0 ** -(min(digits) or max(digits)) if max(digits) else 0.0  # whole numbers must be equal
    return abs(float(numbers[0][1]) - float(numbers[1][1])) <= tolerance


def disagreements(at: Moment, read_views: set[tuple[str, str]], *, is_live: bool) -> list[str]:
    """Return a description of each wrong value in a view.

    Panels that this recording does not have are left out; the values that were read are added to `read_views`.
    """
    wrong = []
    for figure in FIGURES:
        if is_live and not figure.live:
            continue
        expected = figure.expected(at)
        for view, read in figure.views.items():
            said = read(at)
            if said != "not shown":
                read_views.add((figure.name, view))
            if said != "not shown" and not is_same(said, expected):
                wrong.append(f"{figure.name}: {view} says {said!r}, it is {expected!r}")
    return wrong


def wait_until_they_agree(
    qtbot, make: Callable[[], Moment], what: str, *, is_live: bool = False
) -> set[tuple[str, str]]:
    """Wait until no view disagrees. Returns (figure, view) of all values that were read."""
    read_views: set[tuple[str, str]] = set()
    deadline = time.monotonic() + WAIT_S
    while wrong := disagreements(make(), read_views, is_live=is_live):
        assert time.monotonic() < deadline, f"{what}:\n" + "\n".join(wrong)
        qtbot.wait(20)
    return read_views


# Recordings


def slow_recording(path) -> None:
    """Write a recording with steps of 2.5 s and 5 tokens each, between which the pool usage rises and falls."""
    start_ns = 5_000_000_000
    cache = CacheInfo(num_blocks=12, block_size=4, block_bytes=1 << 20)
    hello = Hello(
        epoch=3,
        time_ns=start_ns,
        wall_time_ns=1_700_000_000_300_000_000,
        model=ModelInfo(name="slow"),
        cache=cache,
        device=DeviceInfo(kind="cpu", name="CPU"),
    )
    state = CacheState(hello)
    state.add_request("slow", num_prompt_tokens=5, arrival_ns=start_ns).state = RequestState.RUNNING
    state.totals["num_running"] = 1
    messages: list[TelemetryMessage] = []
    begun = state.snapshot()
    for step in range(1, 11):
        at_ns = start_ns + step * 2_500_000_000
        state.set_blocks([step % 12, (step + 1) % 12], state=BlockState.ACTIVE, filled=3, ref_count=1, owner=1)
        state.free_blocks([(step + 7) % 12])
        timings = Timings(schedule_ns=100_000_000, run_ns=2_300_000_000, commit_ns=100_000_000)
        messages.append(state.frame(step, at_ns, batch={1: 5}, num_decode_tokens=5, timings=timings))
    for beat in range(1, 51):
        messages.append(Heartbeat(epoch=3, time_ns=start_ns + beat * 500_000_000, seq=beat // 5, step=beat // 5))
    with RecordingWriter(path) as writer:
        for message in (hello, replace_time(begun, start_ns), *sorted(messages, key=lambda each: each.time_ns)):
            writer.write(message, wait=True)


def replace_time(snapshot: Snapshot, time_ns: int) -> Snapshot:
    return Snapshot(**{name: getattr(snapshot, name) for name in snapshot.__struct_fields__} | {"time_ns": time_ns})


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    slow = tmp_path_factory.mktemp("slow") / "slow.mcap"
    slow_recording(slow)
    return {"sample": sample_recording(), "hybrid": hybrid_recording(), "slow": slow}


@pytest.fixture
def open_window(make_window, qtbot) -> Iterator[Callable[[Session], MainWindow]]:
    """Return a function that opens a window on a session, with all views floating and visible."""
    sessions: list[Session] = []

    def opened(session: Session) -> MainWindow:
        sessions.append(session)
        window = make_window(session, with_views=VIEWS, size=(900, 700))
        for name in VIEWS:
            dock = window.docks[name]
            dock.setFloating(True)
            dock.resize(1000, 1500)
            dock.show()
        session.start()
        return window

    yield opened
    for session in sessions:
        session.close()


def recent_figures(recording: Recording, overview: SessionOverview, cursor_ns: int) -> dict[str, float | None]:
    """Return the report figures (`kvscope export --from --until`) of the last ten whole wall-clock seconds."""
    end_s = (cursor_ns // SECOND_NS * SECOND_NS - recording.start_ns) / 1e9
    if end_s <= 0:
        return dict.fromkeys(summarize_run(recording, overview, span_of(recording)).figures)
    span = span_of(recording, max(end_s - RECENT_S, recording.first_s), end_s - 1e-9)
    return summarize_run(recording, overview, span).figures


def num_requests(recording: Recording) -> int:
    """Return the number of requests announced by snapshots and frames."""
    announced = set()
    for _, message in recording.messages():
        if isinstance(message, Snapshot):
            announced |= {info.number for info in message.requests_info}
        elif isinstance(message, Frame):
            announced |= {info.number for info in message.new_requests}
    return len(announced)


class Visit:
    """Navigates a window through a recording by seeking, playing and stepping."""

    def __init__(self, window: MainWindow, recording: Recording, qtbot: object) -> None:
        self.window, self.recording, self.qtbot = window, recording, qtbot
        self.timeline = window.session.timeline
        self.overview = read_overview(recording)
        self.num_requests = float(num_requests(recording))
        self.read_views: set[tuple[str, str]] = set()
        qtbot.waitUntil(lambda: window.session.is_overview_complete and window.session.mirror.hello is not None)

    def seek_to(self, at_s: float) -> None:
        self.timeline.go_to(self.recording.start_ns + round(at_s * 1e9))
        source = self.window.session.source
        self.qtbot.waitUntil(lambda: not source.is_seeking, timeout=round(WAIT_S * 1000))

    def play_to(self, at_s: float) -> None:
        self.seek_to(max(at_s - 3.0, 0.0))
        self.timeline.set_speed(8.0)
        self.timeline.play()
        target_ns = self.recording.start_ns + round(at_s * 1e9)
        self.qtbot.waitUntil(
            lambda: self.timeline.cursor_ns >= target_ns or self.timeline.is_at_end, timeout=round(WAIT_S * 1000)
        )
        self.timeline.pause()

    def step(self, at_s: float) -> None:
        self.seek_to(at_s)
        self.timeline.step_frames(1)
        source = self.window.session.source
        self.qtbot.waitUntil(lambda: not source.is_seeking, timeout=round(WAIT_S * 1000))

    def check(self, how: str) -> None:
        def moment() -> Moment:
            cursor_ns = self.timeline.cursor_ns
            at_s = (cursor_ns - self.recording.start_ns) / 1e9
            recent = recent_figures(self.recording, self.overview, cursor_ns) | {"num_requests": self.num_requests}
            return Moment(self.window, self.recording.state_at(at_s), recent)

        self.read_views |= wait_until_they_agree(self.qtbot, moment, how)


def visit_all(visit: Visit, num_moments: int) -> int:
    """Compare all views at times spread over the recording, reached in different ways. Returns their number."""
    length_s = (visit.recording.end_ns - visit.recording.start_ns) / 1e9
    ways = (("after a seek", visit.seek_to), ("paused after playing", visit.play_to), ("after a step", visit.step))
    bar = visit.window.views["throughput"].charts.bar
    for number in range(num_moments):
        at_s = length_s * (number + 0.7) / (num_moments + 0.3)
        how, seek_to = ways[number % len(ways)]
        bar.range_chosen.emit({"30 s": 30.0, "All": float("inf"), "1 min": 60.0}[RANGES[number % 3]])
        seek_to(at_s)
        visit.check(f"{how} at {at_s:.1f} s, over {RANGES[number % 3]}")
    visit.timeline.go_live()
    visit.check("at the end")
    return num_moments + 1


MISSING_FIGURES = {
    "sample": set(),
    "hybrid": set(),
    "slow": {"evicted_blocks_per_min", "evicted blocks", "preemptions", "hit rate", "queued, p50"},
}
"""Figures that a recording does not contain."""


@pytest.mark.parametrize(
    ("name", "num_moments"),
    [(name, 6) for name in MISSING_FIGURES]
    + [pytest.param(name, 20, marks=pytest.mark.storm) for name in MISSING_FIGURES],
)
def test_all_views_show_the_recorded_values_at_several_times(paths, open_window, qtbot, name, num_moments):
    recording = Recording.open(paths[name])
    visit = Visit(open_window(Session(PlaybackSource(recording, is_playing=False))), Recording.open(paths[name]), qtbot)
    assert visit_all(visit, num_moments) == num_moments + 1
    wanted = {
        (figure.name, view) for figure in FIGURES for view in figure.views if figure.name not in MISSING_FIGURES[name]
    }
    assert wanted - visit.read_views == set()
    assert len({name for name, _ in wanted}) >= 20


class LiveRecording:
    """Live source that publishes the messages of a recording up to a time set by the test."""

    name = "ipc:///recorded/live"

    def __init__(self, recording: Recording) -> None:
        self.messages = [(at_s, m) for at_s, m in recording.messages() if isinstance(m, Snapshot | Frame)]
        self.status = SourceStatus(SourceState.LIVE)
        self._times = [at_s for at_s, _ in self.messages]
        self._told = self._until = 0

    def go_on_until(self, at_s: float) -> None:
        self._until = bisect_right(self._times, at_s)

    def poll_update(self) -> Update | None:
        new = [message for _, message in self.messages[self._told : self._until]]
        if not new:
            return None
        self._told = self._until
        begun = [message for message in new if isinstance(message, Snapshot)]
        since = begun[-1].seq if begun else -1
        frames = [message for message in new if isinstance(message, Frame) and message.seq > since]
        return coalesce(frames, snapshot=begun[-1] if begun else None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ["sample", "slow"])
def test_all_views_show_the_same_values_live_and_paused(paths, open_window, qtbot, name):
    recording = Recording.open(paths[name])
    source = LiveRecording(recording)
    window = open_window(Session(source))
    timeline = window.session.timeline

    def check(at_s: float, how: str) -> None:
        state = recording.state_at(at_s)
        wait_until_they_agree(qtbot, lambda: Moment(window, state, {}), f"{how} at {at_s:g} s", is_live=True)

    for at_s in (1.5, 9.0, 13.5, 22.0):
        source.go_on_until(at_s)
        check(at_s, "live")
    timeline.pause()
    source.go_on_until(24.5)
    qtbot.wait(100)
    check(22.0, "paused")
    timeline.go_live()
    check(24.5, "live again")


def test_chart_headlines_do_not_depend_on_the_range(paths, open_window, qtbot):
    recording = Recording.open(paths["sample"])
    window = open_window(Session(PlaybackSource(recording, is_playing=False)))
    visit = Visit(window, recording, qtbot)
    visit.play_to(20.0)
    visit.check("after playing")
    charts = window.views["throughput"].charts

    def shown() -> dict[str, dict[str, str]]:
        return {name: dict(charts.panels[name].legend.values) for name in charts.shown}

    texts = []
    for seconds_shown in (30.0, 60.0, 600.0, float("inf")):
        charts.bar.range_chosen.emit(seconds_shown)
        texts.append(shown())
    assert all({name: text[name] for name in texts[0]} == texts[0] for text in texts)
    assert {name: charts.panels[name].legend.time_text for name in ("kv", "decode")} == {
        "kv": "current",
        "decode": "last 10 s",
    }


RATES = ("2 tok/s", "2.0 tok/s")


def test_slow_engine_has_a_constant_decode_rate(paths, open_window, qtbot):
    """With steps of 2.5 s, the curve must have no spikes between zeros, and the headline must not be 0."""
    recording = Recording.open(paths["slow"])
    window = open_window(Session(PlaybackSource(recording, is_playing=False)))
    visit = Visit(window, recording, qtbot)
    charts = window.views["throughput"].charts
    for seek_to in (visit.seek_to, visit.play_to):
        seek_to(18.2)
        visit.check("at 18.2 s")
        legend = charts.panels["decode"].legend
        qtbot.waitUntil(lambda legend=legend: legend.values.get("decode_tokens") in RATES, timeout=round(WAIT_S * 1000))
        for ago_s in (3.0, 6.0, 9.0):
            at_s = window.session.timeline.shown_monotonic_ns / 1e9 - ago_s
            qtbot.waitUntil(lambda at_s=at_s: read_rate(charts, at_s) in RATES, timeout=round(WAIT_S * 1000))
        charts.show_values_at(None)


def read_rate(charts, at_s: float) -> str:
    """Return the value of the decode chart under the pointer."""
    charts.show_values_at(at_s)
    return charts.panels["decode"].legend.values.get("decode_tokens", "")


# Speed of a request, in the console and in the request table


class AnsweringEngine:
    """Scripted engine that answers the console's prompt; `wait` advances its clock and that of the desktop."""

    number = 3

    def __init__(self, engine, window, now_s: list[float]) -> None:
        self.engine, self.window, self.now_s = engine, window, now_s
        self.num_tokens = 0
        composer = window.views["console"].page.composer
        composer.set_text("x")
        composer.button.click()
        (self.submit,) = [command for command in engine.source.sent if isinstance(command, Submit)]
        self.reply(Accepted(request_id=self.submit.request_id, numbers=(self.number,), num_prompt_tokens=11))
        self.show_request()

    def wait(self, seconds: float) -> None:
        self.now_s[0] += seconds
        self.engine.step += round(seconds * 1000)  # a step takes a millisecond in the scripted engine

    def show_request(self) -> None:
        self.engine.request(self.number, blocks=[1], num_prompt_tokens=11, num_output_tokens=self.num_tokens)
        self.poll()

    def token(self) -> None:
        self.num_tokens += 1
        self.show_request()
        self.reply(Tokens(request_id=self.submit.request_id, token_ids=(1,), text="a"))

    def pause(self, seconds: float) -> None:
        self.engine.event(kind="engine_paused")
        self.wait(seconds)
        self.engine.event(kind="engine_resumed")
        self.poll()

    def reply(self, *replies: Accepted | Tokens) -> None:
        self.engine.source.replies.extend(replies)
        self.poll()
        self.window.views["console"].chat.flush()

    def poll(self) -> None:
        self.window.session.poll()
        while self.window.session.source.updates:
            self.window.session.poll()

    def speeds(self) -> tuple[str, str]:
        """Return the tokens per second shown by the console and by the request table."""
        table = self.window.views["requests"].table
        self.window.views["requests"].draw_all()
        model = table.model()
        titles = [model.headerData(column, Qt.Orientation.Horizontal) for column in range(model.columnCount())]
        (row,) = [row for row in range(model.rowCount()) if model.index(row, titles.index("#")).data() == "3"]
        stats = self.window.views["console"].page.transcript.cards[-1].stats.text()
        return (re.search(r"[\d.]+ tok/s", stats) or [""])[0], model.index(row, titles.index("Speed")).data()


def test_console_and_request_table_show_the_same_speed_of_a_running_answer(engine, session, make_window, monkeypatch):
    """Time in which the engine is paused must not count."""
    now_s = [100.0]
    monkeypatch.setattr("kvscope_app.views.console.chat_answer.time.monotonic", lambda: now_s[0])
    window = make_window(session, with_views=("console", "requests"))
    answering = AnsweringEngine(engine, window, now_s)
    read = []
    gaps_s = (0.5, 0.4, 0.25, 0.3, 0.5)  # the console updates its speed at most every 0.2 s
    for gap_s, pause_s in zip(gaps_s, (0.0, 0.0, 8.0, 0.0, 30.0), strict=True):
        answering.wait(gap_s)
        if pause_s:
            answering.pause(pause_s)
        answering.token()
        read.append(answering.speeds())
    assert read[0] == ("", NOT_KNOWN)
    for num_tokens, (latencies_s, texts) in enumerate(zip(np.cumsum(gaps_s[1:]), read[1:], strict=True), 2):
        speed = f"{short((num_tokens - 1) / latencies_s)} tok/s"
        assert all(is_same(text, speed) for text in texts), (num_tokens, texts, speed)
