"""Every place that shows a figure of a run shows the same number, and it equals the one counted from the frames.

Two runs are checked: the sample recording played over real sockets, and a real engine under pressure, with preemption
by recompute and by swap, forks, drafts, an abort and a refusal. `counted` is separate code on purpose: it only knows
frames.
"""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import unescape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2
from prometheus_client.parser import text_string_to_metric_families

from kvscope_app.session.source_timeline import Viewpoint
from kvscope_app.views.requests.request_rows import read_columns
from kvscope_telemetry import LiveSource
from kvscope_telemetry.exports.comparison.comparison import Run, compare
from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.fleet.fleet import Fleet
from kvscope_telemetry.fleet.fleet_list import parse_list
from kvscope_telemetry.messages.commands import Abort, Accepted, Command, Control, GetSnapshot, GetStatus, Status
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot
from kvscope_telemetry.metrics.metrics_page import MetricsPage
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.transport.server_sockets import ServerSockets

WAIT_S = 120.0
S = 1e9
MIN_FIGURES, MIN_PLACES = 25, 6
BEGIN, INSTANT, COUNTER = 1, 3, 4
"""The unit of time of Perfetto's events, in ns."""
LEVELS = (("usage", "KV usage", 100), ("running", "Running", 1), ("waiting", "Waiting", 1))
"""Counter tracks with a value at the end of each second; others have the peaks within it."""
FLEET_S = 50.0
"""A fleet shows the last minute."""
Figures = dict[str, float]
STATE, OUTPUT = "state", "num_output_tokens"


def wait_for(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.01)


# What the frames come to


def unpacked(data: bytes, form: str = "<u4") -> list[int]:
    numbers: list[int] = np.frombuffer(data, form).tolist()
    return numbers


@dataclass
class FrameCounter:
    """Counts figures, frame by frame."""

    prompts: dict[int, int] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    first_ran: dict[int, int] = field(default_factory=dict)
    first_token: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    newest: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    held: dict[int, int] = field(default_factory=dict)
    """The most tokens that each request had computed when it was preempted."""
    stops: list[tuple[int, int]] = field(default_factory=list)
    """The pauses of the engine."""
    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def running_s(self, from_ns: int, until_ns: int) -> float:
        """Return the seconds between two times without pauses of the engine."""
        stood = sum(max(0, min(end, until_ns) - max(begin, from_ns)) for begin, end in self.stops)
        return (until_ns - from_ns - stood) / S

    def count_frame(self, frame: Frame) -> None:
        for info in frame.new_requests:
            self.prompts[info.number], self.arrivals[info.number] = info.num_prompt_tokens, info.arrival_ns
        before = {number: row.get("num_computed_tokens", 0) for number, row in self.newest.items()}
        for event in frame.events:
            self.total[f"{event.kind} events"] += 1
            if event.kind == "engine_paused":
                self.stops.append((event.time_ns, 1 << 62))
            elif event.kind == "engine_resumed":
                self.stops[-1] = (self.stops[-1][0], event.time_ns)
            elif event.kind == "admitted":
                self.first_ran[event.number] = event.time_ns
            elif event.kind == "resumed":
                self.total["restored_tokens"] += event.num_tokens
            elif event.kind == "preempted":
                self.held[event.number] = max(self.held.get(event.number, 0), event.num_tokens)
            elif event.kind == "finished":
                self.ended[event.number] = event.time_ns
        self._count_rows(frame)
        self._count_batch(frame, before)
        for name in ("evicted", "copied", "loaded"):
            self.total[f"{name}_blocks"] += len(unpacked(getattr(frame.moves, name)))

    def _count_rows(self, frame: Frame) -> None:
        rows = frame.requests
        names = ("num_computed_tokens", "num_cached_tokens", OUTPUT, "num_draft_tokens", "num_accepted_tokens")
        columns = {name: unpacked(getattr(rows, name)) for name in names}
        columns |= {STATE: unpacked(rows.state, "u1"), "num_preemptions": unpacked(rows.num_preemptions, "<u2")}
        for place, number in enumerate(unpacked(rows.number)):
            self.newest[number] |= {name: column[place] for name, column in columns.items() if column}
            if self.newest[number][OUTPUT]:
                self.first_token.setdefault(number, frame.time_ns)

    def _count_batch(self, frame: Frame, before: Mapping[int, int]) -> None:
        batch = frame.batch
        self.total["prefill_tokens"] += batch.num_prefill_tokens
        self.total["decode_tokens"] += batch.num_decode_tokens
        self.total["num_steps"] += bool(batch.number)
        for number, count in zip(unpacked(batch.number), unpacked(batch.num_tokens), strict=True):
            end = self.newest[number].get("num_computed_tokens", 0)
            if number in self.held and end > 0:
                self.total["recomputed_tokens"] += max(0, min(end, self.held[number]) - (end - count))

    def sum_of(self, name: str) -> int:
        return sum(row.get(name, 0) for row in self.newest.values())


def counted(recording: Recording) -> Figures:
    """Return all figures, from frames alone."""
    counting = FrameCounter()
    for frame in recording.frames():
        counting.count_frame(frame)
    total, ran = counting.total, counting.first_ran
    prompts = sum(counting.prompts[number] for number in ran)
    cached = sum(counting.newest[number]["num_cached_tokens"] for number in ran)

    def since_arrival(moments: Mapping[int, int]) -> float:
        return sum(counting.running_s(counting.arrivals[number], at_ns) for number, at_ns in moments.items())

    return {
        "num_steps": total["num_steps"],
        "admitted": len(ran),
        "finished": total["finished events"],
        "aborted": total["aborted events"],
        "refused": total["refused events"],
        "preemptions": total["preempted events"],
        "prompt tokens": prompts,
        "cached_tokens": cached,
        "hit_rate": cached / prompts,
        "restored_tokens": total["restored_tokens"],
        "recomputed_tokens": total["recomputed_tokens"],
        "prefill_tokens": total["prefill_tokens"],
        "decode_tokens": total["decode_tokens"],
        "generation_tokens": counting.sum_of(OUTPUT),
        "evicted_blocks": total["evicted_blocks"],
        "copied_blocks": total["copied_blocks"],
        "loaded_blocks": total["loaded_blocks"],
        "draft_tokens": counting.sum_of("num_draft_tokens"),
        "accepted_tokens": counting.sum_of("num_accepted_tokens"),
        "first tokens": len(counting.first_token),
        "first token, sum": since_arrival(counting.first_token),
        "queue, sum": since_arrival(ran),
        "queue of finished, sum": since_arrival({number: at for number, at in ran.items() if number in counting.ended}),
        "whole time, sum": since_arrival(counting.ended),
        **levels(recording),
    }


def levels(recording: Recording) -> Figures:
    """Return levels at the end of each second, and the peaks of all frames."""
    pool: dict[int, list[float]] = {}
    usages, waiting = [0.0], [0]
    state = np.empty(0, np.uint8)
    counters, size = None, 1
    for log_ns, message in recording.messages():
        if isinstance(message, Snapshot):
            state, counters = np.frombuffer(message.blocks.state, "u1").copy(), message.counters
            size = message.hello.cache.num_blocks
        elif isinstance(message, Frame):
            state[unpacked(message.blocks.ids)] = np.frombuffer(message.blocks.state, "u1")
            counters = message.counters
        if counters is not None:
            second = int((recording.start_ns + round(log_ns * S)) // 10**9)
            usages.append(np.count_nonzero(state[:size] == 1) / size)
            waiting.append(counters.num_waiting)
            pool[second] = [usages[-1], counters.num_running, counters.num_waiting]
    usage_means, running_means, waiting_means = np.array(list(pool.values())).mean(axis=0)
    return {
        "usage_peak": max(usages),
        "usage_mean": usage_means,
        "running_mean": running_means,
        "waiting_mean": waiting_means,
        "waiting_peak": max(waiting),
    }


# What each place says


def of_info(path: Path) -> Figures:
    """Return the figures of `kvscope info --json`."""
    words = [sys.executable, "-m", "kvscope_app.main", "info", "--json", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True, env={})
    document = json.loads(done.stdout)
    found: Figures = document["totals"] | {name: document["figures"][name] for name in ("hit_rate", "running_mean")}
    found |= {
        "usage_peak": document["peak_usage"],
        "usage_mean": document["mean_usage"],
        "waiting_peak": document["peak_waiting"],
    }
    found |= {"num_steps": document["num_steps"], "waiting_mean": document["figures"]["waiting_mean"]}
    return found | {"prompt tokens": document["figures"]["new_prompt_tokens"]}


def of_compare(recording: Recording, overview: SessionOverview) -> Figures:
    """Return the figures of a comparison of the run with itself; rates are those of the recorded time."""
    run = Run(recording, overview, span_of(recording))
    rows = {row.key: row.a for row in compare(run, run).rows if row.a is not None}
    names = ("finished", "preemptions", "hit_rate", "restored_tokens", "recomputed_tokens", "usage_mean", "usage_peak")
    found = {name: rows[name] for name in (*names, "running_mean", "waiting_mean")}
    minutes = rows["finished"] / rows["finished_per_min"]
    found |= {name: rows[f"{name}_per_min"] * minutes for name in ("evicted_blocks", "copied_blocks")}
    tokens = ("prefill_tokens", "decode_tokens", "generation_tokens")
    return found | {name: rows[f"{name}_per_s"] * minutes * 60 for name in tokens}


def of_report(recording: Recording, folder: Path) -> Figures:
    """Return the figures in the text of the report page."""
    export(recording, ExportTarget.from_path(folder / "report.html"))
    page = (folder / "report.html").read_text("utf-8")
    items = re.findall(r"<dt>(.*?)</dt><dd>(.*?)(?:<small>(.*?)</small>)?</dd>", page)
    said = {unescape(name): (numbers_in(value), numbers_in(more)) for name, value, more in items}
    (prefix_hits, (cached, prompts)), (finished, (admitted,)) = said["Prefix hit rate"], said["Requests finished"]
    return {
        "hit_rate, in tenths of a percent": prefix_hits[0],
        "cached_tokens": cached,
        "prompt tokens": prompts,
        "finished": finished[0],
        "admitted": admitted,
        "preemptions": said["Preemptions"][0][0],
        "refused": said["Refused"][0][0],
        "aborted": said["Refused"][1][0],
        "decode_tokens": said["Decode"][1][0],
        "prefill_tokens": said["Prefill"][1][0],
        "restored_tokens": said["Restored"][0][0],
        "recomputed_tokens": said["Restored"][1][0],
        "evicted_blocks": said["Blocks evicted"][0][0],
        "copied_blocks": said["Blocks evicted"][1][0],
        "waiting_peak": said["Waiting, peak"][0][0],
    }


def numbers_in(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def of_metrics(columns: Mapping[str, list[float]]) -> Figures:
    """Return the sums of the table of seconds."""
    names = (
        "admitted",
        "finished",
        "aborted",
        "refused",
        "preemptions",
        "num_steps",
        "draft_tokens",
        "accepted_tokens",
    )
    tokens = ("cached_tokens", "restored_tokens", "recomputed_tokens", "prefill_tokens", "decode_tokens")
    blocks = ("evicted_blocks", "copied_blocks", "loaded_blocks")
    others = ("generation_tokens", "draft_tokens", "accepted_tokens")
    found = {name: sum(columns[name]) for name in (*names, *tokens, *blocks, *others)}
    found["prompt tokens"] = found["cached_tokens"] + sum(columns["prompt_tokens"])
    found["first tokens"] = sum(columns["first_token_count"])
    found |= {"usage_peak": max(columns["peak_usage"]), "usage_mean": float(np.mean(columns["usage"]))}
    found |= {"waiting_peak": max(columns["peak_waiting"]), "waiting_mean": float(np.mean(columns["num_waiting"]))}
    found["running_mean"] = float(np.mean(columns["num_running"]))
    return found | {"hit_rate": found["cached_tokens"] / found["prompt tokens"]}


def of_requests(rows: list[dict[str, str]]) -> Figures:
    """Return the sums of the table of requests."""
    ran = [row for row in rows if row["queue_ns"]]

    def total(name: str, of: list[dict[str, str]] = rows) -> int:
        return sum(int(row[name] or 0) for row in of)

    ended = [row for row in rows if row["state"] == "finished"]
    return {
        "admitted": len(ran),
        "finished": len(ended),
        "aborted": sum(row["state"] == "aborted" for row in rows),
        "preemptions": total("num_preemptions"),
        "prompt tokens": total("num_prompt_tokens", ran),
        "cached_tokens": total("num_cached_tokens", ran),
        "hit_rate": total("num_cached_tokens", ran) / total("num_prompt_tokens", ran),
        "generation_tokens": total("num_output_tokens"),
        "draft_tokens": total("num_draft_tokens"),
        "accepted_tokens": total("num_accepted_tokens"),
        "first tokens": sum(bool(row["first_token_ns"]) for row in rows),
        "first token, sum": total("first_token_ns") / S,
        "queue, sum": total("queue_ns") / S,
        "queue of finished, sum": total("queue_ns", ended) / S,
        "whole time, sum": total("total_ns", ended) / S,
    }


def of_events(rows: list[dict[str, str]]) -> Figures:
    kinds = [row["kind"] for row in rows]
    restored = sum(int(row["num_tokens"]) for row in rows if row["kind"] == "resumed")
    names = {"admitted": "admitted", "finished": "finished", "aborted": "aborted", "refused": "refused"}
    return {name: kinds.count(kind) for kind, name in (names | {"preempted": "preemptions"}).items()} | {
        "restored_tokens": restored
    }


def of_perfetto(recording: Recording, folder: Path) -> Figures:
    """Return the figures of the trace: counters of each second, a slice for each step, an instant for each first
    token.
    """
    export(recording, ExportTarget.from_path(folder / "run.perfetto-trace"))
    trace = trace_pb2.Trace()
    trace.ParseFromString((folder / "run.perfetto-trace").read_bytes())
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    events = [(names[p.track_event.track_uuid], p.track_event) for p in trace.packet if p.HasField("track_event")]
    counters: dict[str, list[float]] = defaultdict(list)
    counted = [p for p in trace.packet if p.HasField("track_event") and p.track_event.type == COUNTER]
    for name, event in events:
        if event.type == COUNTER:
            counters[name].append(event.double_counter_value)
    ends = {packet.timestamp for packet in counted if names[packet.track_event.track_uuid] == "Free blocks"}
    at_ends: dict[str, list[float]] = defaultdict(list)
    for packet in counted:
        if packet.timestamp in ends:
            at_ends[names[packet.track_event.track_uuid]].append(packet.track_event.double_counter_value)
    kinds = [event.name for _, event in events if event.type == INSTANT]
    return {
        "usage_peak": max(counters["KV usage"]) / 100,
        "waiting_peak": max(counters["Waiting"]),
        **{f"{name}_mean": float(np.mean(at_ends[track])) / size for name, track, size in LEVELS},
        "decode_tokens": sum(counters["Decode tokens/s"]),
        "prefill_tokens": sum(counters["Prefill tokens/s"]),
        "preemptions": sum(counters["Preemptions/s"]),
        "evicted_blocks": sum(counters["Evicted blocks/s"]),
        "first tokens": kinds.count("first token"),
        "num_steps": sum(name == "Steps" and event.type == BEGIN for name, event in events),
    }


def of_prometheus(page: MetricsPage) -> Figures:
    """Return the figures of a scrape."""
    text = page.render("text/plain")[0].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    sums: dict[str, float] = defaultdict(float)
    for sample in samples:
        sums[sample.name] += sample.value
        if sample.name == "vllm:request_success_total":
            sums[sample.labels["finished_reason"]] += sample.value
    assert sums["vllm:prefix_cache_queries_total"] == sums["vllm:prompt_tokens_total"]
    assert sums["kvscope_preemptions_total"] == sums["vllm:num_preemptions_total"]
    assert sums["vllm:iteration_tokens_total_sum"] > 0
    names = {
        "num_steps": "kvscope_steps",
        "admitted": "kvscope_requests_admitted",
        "refused": "kvscope_requests_refused",
        "preemptions": "vllm:num_preemptions",
        "prompt tokens": "vllm:prompt_tokens",
        "cached_tokens": "vllm:prefix_cache_hits",
        "restored_tokens": "kvscope_restored_tokens",
        "recomputed_tokens": "kvscope_recomputed_tokens",
        "generation_tokens": "vllm:generation_tokens",
        "evicted_blocks": "kvscope_evicted_blocks",
        "copied_blocks": "kvscope_copied_blocks",
        "loaded_blocks": "kvscope_swapped_in_blocks",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens",
        "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    }
    latencies = {
        "first token, sum": "time_to_first_token",
        "queue of finished, sum": "request_queue_time",
        "whole time, sum": "e2e_request_latency",
    }
    return {
        **{name: sums[f"{metric}_total"] for name, metric in names.items()},
        **{name: sums[f"vllm:{metric}_seconds_sum"] for name, metric in latencies.items()},
        "first tokens": sums["vllm:time_to_first_token_seconds_count"],
        "aborted": sums["abort"],
        "finished": sums["vllm:request_success_total"] - sums["abort"],
        "hit_rate": sums["vllm:prefix_cache_hits_total"] / sums["vllm:prefix_cache_queries_total"],
    }


def of_window(view: Viewpoint) -> dict[str, Figures]:
    """Return the figures of a window: totals, the bins under its charts, its table of requests."""
    totals, columns = view.mirror.counters, view.history.window(view.history.max_seconds).columns
    names = ("admitted", "finished", "aborted", "refused", "preemptions", "cached_tokens", "restored_tokens")
    tokens = ("recomputed_tokens", "generation_tokens", "draft_tokens", "accepted_tokens")
    counters = {
        name: float(getattr(totals, name))
        for name in (*names, *tokens, "evicted_blocks", "copied_blocks", "loaded_blocks")
    }
    counters["prompt tokens"] = float(totals.prompt_tokens + totals.cached_tokens)
    counters["hit_rate"] = counters["cached_tokens"] / counters["prompt tokens"]
    charted = ("prefill_tokens", "decode_tokens", "preemptions", "cached_tokens", "evicted_blocks", "copied_blocks")
    charts = {
        name: float(np.nansum(columns[name])) for name in (*charted, "draft_tokens", "accepted_tokens", "num_steps")
    }
    charts["prompt tokens"] = float(np.nansum(columns["prompt_tokens"])) + charts["cached_tokens"]
    charts["hit_rate"] = charts["cached_tokens"] / charts["prompt tokens"]
    table = read_columns(view.mirror, view.history.request_times)
    ran = np.isfinite(table.queue_s)
    requests = {
        "admitted": float(ran.sum()),
        "prompt tokens": float(table.num_prompt_tokens[ran].sum()),
        "cached_tokens": float(table.num_cached_tokens[ran].sum()),
        "generation_tokens": float(table.num_output_tokens.sum()),
        "preemptions": float(table.num_preemptions.sum()),
        "draft_tokens": float(table.num_draft_tokens.sum()),
        "accepted_tokens": float(table.num_accepted_tokens.sum()),
        "first tokens": float(np.isfinite(table.ttft_s).sum()),
        "first token, sum": float(np.nansum(table.ttft_s)),
        "queue, sum": float(np.nansum(table.queue_s)),
        "finished": float((table.ending == 1).sum()),
        "aborted": float((table.ending == 2).sum()),
    }
    requests["hit_rate"] = requests["cached_tokens"] / requests["prompt tokens"]
    return {"totals": counters, "charts": charts, "requests table": requests}


class Observers:
    """Everything that watches an engine while it runs, connected from the start: a window, `/metrics`, a fleet."""

    def __init__(self, endpoint: str) -> None:
        self.source = LiveSource(endpoint)
        self.view = Viewpoint(self.source, SessionOverview())
        self.page, self.fleet = MetricsPage(endpoint), Fleet()
        self.fleet.watch(parse_list(endpoint).entries)
        self.began_s = time.monotonic()

    def poll(self) -> None:
        while (update := self.source.poll_update()) is not None:
            assert self.view.apply(update)

    def are_connected(self) -> bool:
        self.poll()
        is_scraped = b"kvscope_steps_total" in self.page.render("text/plain")[0]
        return self.view.has_state and is_scraped and [row.usage is not None for row in self.fleet.rows] == [True]

    def have_received(self, frame: Frame) -> bool:
        """Return whether all have received the run up to its last frame."""
        self.poll()
        steps = re.search(rb"kvscope_steps_total\{.*\} (\S+)", self.page.render("text/plain")[0])
        return self.view.mirror.seq >= frame.seq and steps is not None and float(steps[1]) >= frame.step

    def figures(self) -> dict[str, Figures]:
        found = {"/metrics": of_prometheus(self.page)} | of_window(self.view)
        rate = found["totals"]["hit_rate"]
        is_late = self.began_s + FLEET_S
        wait_for(lambda: self._fleet_has_received(rate) or time.monotonic() > is_late, f"a fleet that says {rate}")
        if time.monotonic() - self.began_s < FLEET_S:
            found["fleet"] = {"hit_rate": self.fleet.rows[0].hit_rate or 0.0}
        return found

    def _fleet_has_received(self, hit_rate: float) -> bool:
        """Return whether the fleet has received everything; it polls several times a second."""
        (row,) = self.fleet.rows
        return row.hit_rate is not None and abs(row.hit_rate - hit_rate) < 1e-9

    def close(self) -> None:
        self.source.close()
        self.page.close()
        self.fleet.close()


@pytest.fixture
def connect_observers() -> Iterator[Callable[[str], Observers]]:
    """Function that connects all observers to an endpoint: `connect_observers(endpoint)`."""
    made: list[Observers] = []

    def attach(endpoint: str) -> Observers:
        made.append(Observers(endpoint))
        wait_for(made[-1].are_connected, "watchers")
        return made[-1]

    yield attach
    for each in made:
        each.close()


def of_files(path: Path, folder: Path) -> dict[str, Figures]:
    """Return the figures of everything that is made from a recording."""
    recording = Recording.open(path)
    found = {"info": of_info(path), "compare": of_compare(recording, read_overview(recording))}
    found["report"] = of_report(recording, folder)
    tables = {}
    for kind in ("metrics", "requests", "events"):
        export(recording, ExportTarget.from_path(folder / f"{kind}.csv"))
        tables[kind] = list(csv.DictReader(io.StringIO((folder / f"{kind}.csv").read_text("utf-8-sig"))))
        export(recording, ExportTarget.from_path(folder / f"{kind}.parquet"))
        export(recording, ExportTarget.from_path(folder / f"{kind}.arrow"))
    named = [name for name in tables["metrics"][0] if not name.endswith("_utc")]
    columns = {name: [float(row[name] or 0) for row in tables["metrics"]] for name in named}
    found["metrics.csv"], found["requests.csv"] = of_metrics(columns), of_requests(tables["requests"])
    found["events.csv"] = of_events(tables["events"])

    for suffix in ("parquet", "arrow"):
        read = {kind: without_times(folder / f"{kind}.{suffix}") for kind in tables}
        words = {kind: [as_strings(row) for row in read[kind].to_pylist()] for kind in tables}
        found[f"metrics.{suffix}"] = of_metrics(read["metrics"].to_pydict())
        found[f"requests.{suffix}"] = of_requests(words["requests"])
        found[f"events.{suffix}"] = of_events(words["events"])
    return found | {"Perfetto": of_perfetto(recording, folder)}


def without_times(path: Path) -> Any:
    """Return a table without its times, because Python's have no nanoseconds."""
    is_parquet = path.suffix == ".parquet"
    table = pyarrow.parquet.read_table(path) if is_parquet else pyarrow.feather.read_table(path)
    return table.select([column.name for column in table.schema if "timestamp" not in str(column.type)])


def as_strings(row: Mapping[str, object]) -> dict[str, str]:
    return {name: "" if value is None else str(value) for name, value in row.items()}


def check_figures(raw: Figures, places: Mapping[str, Figures]) -> None:
    """Check that each place shows the figures of the frames, and that enough places show enough figures."""
    asked: dict[str, list[str]] = defaultdict(list)
    wrong = []
    for place, figures in places.items():
        for name, value in figures.items():
            if name == "hit_rate, in tenths of a percent":
                name, value, expected = "hit_rate", round(value, 1), round(100 * raw["hit_rate"], 1)
            elif name in raw:
                expected = raw[name]
            else:
                continue
            asked[name].append(place)
            if value != pytest.approx(expected, rel=1e-6, abs=1e-6):
                wrong.append(f"{name}: {place} says {value:g}, the frames come to {expected:g}")
    assert not wrong, "\n".join(wrong)
    few = {name: sorted(where) for name, where in asked.items() if len(where) < MIN_PLACES}
    assert len(asked) - len(few) >= MIN_FIGURES, few


# The two runs


class PlayedRecording:
    """A recording sent over real sockets like by its engine."""

    def __init__(self, recording: Recording, endpoint: str) -> None:
        messages = [message for _, message in recording.messages()]
        self._frames = [message for message in messages if isinstance(message, Frame)]
        self._mirror, self._lock = Mirror(), threading.Lock()
        begun = next(message for message in messages if isinstance(message, Snapshot))
        self._mirror.apply(coalesce([], snapshot=begun))
        self._sockets = ServerSockets(
            endpoint, on_command=self._answer, heartbeat=self._heartbeat, keyless=Role.OPERATOR
        )

    def play(self) -> Frame:
        """Play all of it, and return the last frame."""
        for place, frame in enumerate(self._frames):
            with self._lock:
                self._mirror.apply(coalesce([frame]))
            self._sockets.publish(frame)
            if place % 50 == 0:
                time.sleep(0.02)  # a step takes longer than this
        return self._frames[-1]

    def close(self) -> None:
        self._sockets.close()

    def _heartbeat(self) -> Heartbeat:
        hello, mirror = self._mirror.hello, self._mirror
        assert hello is not None
        now_ns = mirror.time_ns  # by the clock of the frames, which is that of another computer
        return Heartbeat(epoch=hello.epoch, time_ns=now_ns, seq=mirror.seq, step=mirror.step)

    def _answer(self, client: bytes, command: Command) -> None:
        with self._lock:
            state = snapshot_of(self._mirror)
        if isinstance(command, GetSnapshot):
            tagged = Snapshot(**{name: getattr(state, name) for name in state.__struct_fields__} | {"tag": command.tag})
            self._sockets.reply(client, tagged)
        elif isinstance(command, GetStatus):
            where = self._sockets.telemetry_endpoint
            status = Status(phase="ready", telemetry_endpoint=where, hello=state.hello, tag=command.tag)
            self._sockets.reply(client, status)


def test_figures_of_the_sample_recording_are_equal_in_every_view_and_export(
    connect_observers: Callable[[str], Observers], socket_folder: Path, tmp_path: Path
) -> None:
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as path:
        recording = Recording.open(path)
        raw = counted(recording)
        played = PlayedRecording(recording, f"ipc://{socket_folder}/telemetry")
        try:
            watchers = connect_observers(f"ipc://{socket_folder}/telemetry")
            last = played.play()
            wait_for(lambda: watchers.have_received(last), "the last frame")
            places = watchers.figures() | of_files(path, tmp_path)
        finally:
            played.close()
    assert (raw["cached_tokens"], raw["prompt tokens"]) == (2086, 3949)
    assert raw["hit_rate"] == pytest.approx(0.528, abs=5e-4)
    check_figures(raw, places)


def test_figures_of_a_live_engine_are_equal_in_every_view_and_export(
    start_engine: Callable[..., Any],
    connect_client: Callable[..., Any],
    connect_observers: Callable[[str], Observers],
    tiny_model: Callable[..., str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "live.mcap"
    guess = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    engine = start_engine(
        *("--model", tiny_model(), "--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", "16"),
        *("--kv-host-memory", "32KiB", "--preemption", "swap", "--speculative-config", guess, "--record", str(path)),
    )
    talk = connect_client(engine)
    watchers = connect_observers(engine.endpoint)
    talk.source.send(Control(action="pause"))  # so that they run together
    shared = list(range(1, 40))
    for number in range(8):
        prompt = [*shared[: 16 * (number % 3)], *range(50 + number, 70 + number)]
        talk.submit_ids(f"r{number}", prompt, max_tokens=60)
    talk.submit_ids("forks", shared, max_tokens=30, n=3, temperature=1.0, seed=1)
    talk.submit_ids("aborted", range(3, 30), max_tokens=60)
    talk.submit_ids("refused", [1] * 5, max_tokens=1 << 20)
    talk.wait_for(lambda: any(isinstance(one, Accepted) and one.request_id == "aborted" for one in talk.replies))
    talk.source.send(Abort(request_id="aborted"))
    talk.source.send(Control(action="resume"))
    talk.wait_for(lambda: len(talk.finished()) >= 10)
    talk.wait_for(lambda: talk.source.mirror.counters.finished >= 11)
    talk.submit_ids("again", shared, max_tokens=4)
    talk.wait_for(lambda: talk.source.mirror.counters.finished >= 12)
    seq = talk.source.mirror.seq
    wait_for(lambda: (watchers.poll(), watchers.view.mirror.seq >= seq)[1], "the last frame")
    wait_for(lambda: of_prometheus(watchers.page)["finished"] >= 12, "a scrape")
    figures = watchers.figures()
    talk.source.close()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(240) == 0
    raw = counted(Recording.open(path))
    causes = {event.data.is_swapped for event in events_of(path) if event.kind == "preempted" and event.data}
    assert causes == {True, False}, "preemptions by swap and by recompute"
    pressed = ("preemptions", "restored_tokens", "recomputed_tokens", "cached_tokens", "draft_tokens", "aborted")
    assert not [name for name in pressed if not raw[name]]
    check_figures(raw, figures | of_files(path, tmp_path))


def events_of(path: Path) -> list[Any]:
    return [event for frame in Recording.open(path).frames() for event in frame.events]
