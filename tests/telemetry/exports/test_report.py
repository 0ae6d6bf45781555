"""The HTML report: well-formed, escaped, self-contained and small."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.telemetry.exports.conftest import story

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.report.charts import ChartLine, ReportTimeAxis, chart
from kvscope_telemetry.exports.report.interaction import MAX_POINTS, ChartSeries, interaction
from kvscope_telemetry.exports.report.png import png
from kvscope_telemetry.exports.report.report_page import clean
from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

HOSTILE = "\"'><script>alert(1)</script>\0<img src=x onerror=alert(2)>"
NUMBERS = (
    *("queue_ns", "first_token_ns", "preempted_ns"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_preemptions"),
)
VOID = {"meta", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """Collects the tags, the open tags and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        else:
            self.text += data


def report(recording: Recording, path: Path, **span: float) -> tuple[str, Page]:
    export(recording, ExportTarget.from_path(path), **span)
    html = path.read_text("utf-8")
    return html, Page(html)


def test_report_is_one_complete_page_without_external_resources(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    html, page = report(Recording.open(record(1500).path), tmp_path / "report.html")
    assert page.open == []
    assert len(html) < 2_000_000
    linked = [value for name, value in page.attributes if name in ("href", "src")]
    assert linked
    assert all(value is not None and value.startswith("data:image/png;base64,") for value in linked)
    assert "url(" not in html
    assert "prefers-color-scheme:dark" in html
    for words in (
        "KV usage, peak",
        "tokens/s",
        "Blocks by address over time",
        "Most delayed requests",
        "What happened",
    ):
        assert words in page.text, words
    for picture in re.findall(r"<svg viewBox.*?</svg>(?=\n)", html, re.DOTALL):
        ET.fromstring(picture)


def test_untrusted_text_is_escaped_in_the_report(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    _, page = report(record_story(HOSTILE), tmp_path / "report.html")
    assert page.open == []
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "\0" not in page.text


def test_only_the_reports_script_may_run(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    html, page = report(record_story(HOSTILE), tmp_path / "report.html")
    data, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'\"" in html
    assert json.loads(data)["axis"]["from"] == 0


def test_report_data_has_the_requests_of_the_export_and_all_seconds(
    record_story: Callable[..., Recording], tmp_path: Path
) -> None:
    recording = record_story()
    _, page = report(recording, tmp_path / "report.html")
    data = json.loads(page.scripts[0])
    requests = {column["key"]: column["values"] for column in data["requests"]["columns"]}
    assert requests["id"] == ["slow", "r2"]
    assert (requests["queue"][0], requests["first"][0], requests["total"]) == (0.1, 0.15, [1.4, None])
    export(recording, ExportTarget.from_path(tmp_path / "metrics.csv"))
    with (tmp_path / "metrics.csv").open(encoding="utf-8-sig", newline="") as file:
        metrics = list(csv.DictReader(file))
    assert data["times"] == pytest.approx([float(row["second_s"]) for row in metrics], abs=0.01)
    shown = {line["name"]: line["values"] for chart in data["charts"] for line in chart["lines"]}
    assert shown["preemptions"] == [int(row["preemptions"]) for row in metrics]


def test_report_of_many_requests_has_the_longest_and_stays_below_2_mb() -> None:
    axis, count = ReportTimeAxis(0.0, 50_000.0), 40_000
    columns = {name: Column(name, "int", [7] * count) for name in NUMBERS}
    columns["number"] = Column("number", "int", list(range(count)))
    columns["total_ns"] = Column("total_ns", "int", [None, *(row * 1_000_000 for row in range(1, count))])
    columns["arrival_s"] = Column("arrival_s", "float", np.arange(count, dtype=np.float64))
    texts = {name: Column(name, "text", ["界" * 99] * count) for name in ("request_id", "state", "adapter")}
    table = Table("requests", tuple((columns | texts).values()), {})
    values = np.where(np.arange(50_000) % 2, np.nan, np.arange(50_000.0))
    charts = [ChartSeries([ChartLine("x", "one", values)], "", 50_000.0)]
    html, _ = interaction(axis, np.arange(50_000.0), charts, table, 1_000_000)
    assert len(html.encode()) < 1_000_000
    data = json.loads(Page(html).scripts[0])
    kept = data["requests"]["columns"][0]["values"]
    assert data["requests"]["num_all"] == count
    assert kept == [0, *range(count - len(kept) + 1, count)], "the unfinished one, and those with the longest time"
    assert len(data["times"]) == len(data["charts"][0]["lines"][0]["values"]) <= MAX_POINTS
    assert max(data["charts"][0]["lines"][0]["values"]) == pytest.approx(50_000, rel=1e-3)


def test_report_names_the_most_delayed_requests_and_the_reasons(
    record_story: Callable[..., Recording], tmp_path: Path
) -> None:
    _, page = report(record_story(), tmp_path / "report.html")
    assert "waited 0.10 s in the queue" in page.text
    assert "swapped out for request #2, 0.30 s aside: request #2 needed 3 blocks" in page.text
    assert "too long" in page.text


def test_report_of_a_suspended_process_does_not_call_it_paused(tmp_path: Path) -> None:
    messages = story()
    frame = messages[-1]
    assert isinstance(frame, Frame)
    suspended = EventData(kind="process_suspended", lasted_ns=500_000_000)
    event = Event(kind="process_suspended", time_ns=frame.time_ns, data=suspended)
    with RecordingWriter(tmp_path / "suspended.mcap") as writer:
        for message in (*messages[:-1], replace(frame, events=(*frame.events, event))):
            writer.write(message, wait=True)
    html, page = report(Recording.open(writer.path), tmp_path / "report.html")
    assert re.search(r'<g class="stopped"[^>]*><title>process suspended, 0.5 s', html)
    assert "engine suspended" in page.text
    assert "paused" not in page.text


def test_report_of_an_empty_range_is_a_complete_page(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    _, page = report(record_story(), tmp_path / "report.html", from_s=2.0, until_s=2.1)
    assert page.open == []
    assert "KV usage, peak" in page.text
    assert "What happened" not in page.text


def test_report_shows_gaps_and_restarts(record: Callable, make_messages: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    first, second = make_messages(100), make_messages(100, epoch=2)
    recording = Recording.open(record([*first[:40], *first[90:], *second]).path)
    _, page = report(recording, tmp_path / "report.html")
    assert "frames were lost in this second" in page.text or "not recorded for" in page.text
    assert "the engine was restarted" in page.text


def test_report_of_a_long_recording_stays_small(record: Callable, make_messages: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(make_messages(3000, num_blocks=4000)).path)
    html, _ = report(recording, tmp_path / "report.html")
    assert len(html) < 1_000_000


def test_chart_lines_break_at_unknown_values() -> None:
    axis = ReportTimeAxis(0.0, 100.0)
    times = np.arange(100.0)
    values = np.where((times > 40) & (times < 60), np.nan, 5.0)
    drawn = chart(axis, times, [ChartLine("x", "one", values)], unit="")
    assert drawn.count("<polyline") == 2
    alone = np.full(100, np.nan)
    alone[7] = 1.0
    assert "<circle" in chart(axis, times, [ChartLine("x", "one", alone)], unit="")
    many = chart(axis, np.linspace(0, 100, 50_000), [ChartLine("x", "one", np.sin(np.arange(50_000.0)))], unit="")
    assert len(many) < 20_000


def test_png_contains_the_given_pixels() -> None:
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    data = png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3, 2)
    length = struct.unpack(">I", data[33:37])[0]
    rows = zlib.decompress(data[41 : 41 + length])
    assert rows == b"\0" + pixels[0].tobytes() + b"\0" + pixels[1].tobytes()
    assert base64.b64encode(data)


@pytest.mark.parametrize(("text", "shown"), [("<b>&\"'", "&lt;b&gt;&amp;&quot;&#x27;"), ("a\x07\u202eb", "a��b")])
def test_text_is_escaped_and_control_characters_replaced(text: str, shown: str) -> None:
    assert clean(text) == shown
