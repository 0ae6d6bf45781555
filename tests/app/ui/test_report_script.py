"""The report's script: its logic in Qt's JavaScript engine, and the whole page in Chromium where that is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QCoreApplication
from PySide6.QtQml import QJSEngine
from tests.telemetry.exports.conftest import record_story

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.recordings.reader import Recording

__all__ = ["record_story"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
COLUMNS = [
    {"key": "number", "kind": "count", "values": [1, 2, 3, 4]},
    {"key": "id", "kind": "text", "values": ["chat-1", "Batch-2", "batch-3", "<b>"]},
    {"key": "total", "kind": "seconds", "values": [2.5, None, 0.5, 2.5]},
]


@pytest.fixture(scope="module")
def evaluate(qapp: QCoreApplication) -> Callable[[str], Any]:
    """Function that evaluates a JavaScript expression after the script's logic, and returns its value."""
    engine: Any = QJSEngine(qapp)
    source = (resources.files("kvscope_resources") / "report" / "logic.js").read_text("utf-8")
    assert not engine.evaluate(source).isError()

    def value_of(expression: str) -> Any:
        value = engine.evaluate(f"JSON.stringify({expression})")
        assert not value.isError(), value.toString()
        return json.loads(value.toString())

    return value_of


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [0, 1, 2, 3]),
        ("BATCH", [1, 2]),
        ("total>1", [0, 3]),
        ("total<=0.5 batch", [2]),
        ("number=2", [1]),
        ("total>=0", [0, 2, 3]),
        ("<b>", [3]),
        ("missing>1", []),
        ("total>1e", []),
    ],
)
def test_filter_compares_numbers_and_finds_texts(evaluate: Callable[[str], Any], text: str, rows: list[int]) -> None:
    assert evaluate(f"filteredRows({json.dumps(COLUMNS)}, {json.dumps(text)})") == rows


def test_sorting_puts_unknown_values_last_in_both_directions(evaluate: Callable[[str], Any]) -> None:
    column = json.dumps(COLUMNS[2])
    assert evaluate(f"sortedRows([0, 1, 2, 3], {column}, false)") == [2, 0, 3, 1]
    assert evaluate(f"sortedRows([0, 1, 2, 3], {column}, true)") == [0, 3, 2, 1]


def test_zoomed_curve_ends_at_the_view_and_breaks_at_unknown_values(evaluate: Callable[[str], Any]) -> None:
    times, values = [0, 1, 2, 3, 4, 5, 6, 7, 20, 21], [1, 2, 3, None, 5, 6, 7, 8, 9, 10]

    def runs(first: float, last: float) -> Any:
        return evaluate(f"curveRuns({times}, {json.dumps(values)}, {first}, {last}, 2.5)")

    assert runs(0, 21) == [[[0, 1], [1, 2], [2, 3]], [[4, 5], [5, 6], [6, 7], [7, 8]], [[20, 9], [21, 10]]]
    assert runs(1.5, 5.25) == [[[1.5, 2.5], [2, 3]], [[4, 5], [5, 6], [5.25, 6.25]]]
    assert runs(5.25, 5.75) == [[[5.25, 6.25], [5.75, 6.75]]]
    assert runs(8, 19) == []


def test_zoom_stays_in_the_recording_and_has_a_smallest_length(evaluate: Callable[[str], Any]) -> None:
    full = "{from: 10, until: 110}"
    assert evaluate(f"limitedView(40, 20, {full}, 1)") == {"from": 20, "until": 40}
    assert evaluate(f"limitedView(0, 30, {full}, 1)") == {"from": 10, "until": 40}
    assert evaluate(f"limitedView(109.9, 110, {full}, 1)") == {"from": 109, "until": 110}
    assert evaluate(f"limitedView(-999, 999, {full}, 1)") == {"from": 10, "until": 110}


def test_hover_finds_the_nearest_second(evaluate: Callable[[str], Any]) -> None:
    assert [evaluate(f"nearestIndex([1, 2, 4], {time})") for time in (0, 1.4, 1.6, 3.5, 9)] == [0, 0, 1, 2, 2]
    assert evaluate("nearestIndex([], 1)") == -1


def test_ticks_are_round_and_within_the_view(evaluate: Callable[[str], Any]) -> None:
    assert evaluate("roundTicks(12, 52, 8)") == [15, 20, 25, 30, 35, 40, 45, 50]
    assert evaluate("roundTicks(5, 5, 8)") == []


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Function that opens a report in Chromium, runs a script after it if there is one, and returns the final DOM."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")

    def dom(report: Path, script: str = "") -> str:
        if script:  # the report's policy permits no other script
            html = re.sub("; script-src '[^']*'", "; script-src 'unsafe-inline'", report.read_text("utf-8"))
            report.write_text(html.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        options = ("--headless", "--no-sandbox", "--disable-gpu", profile, "--virtual-time-budget=2000", "--dump-dom")
        done = subprocess.run([str(CHROMIUM), *options, report.as_uri()], capture_output=True, text=True, timeout=240)
        return done.stdout

    return dom


def test_report_in_a_browser_lists_the_requests(
    record_story: Callable[..., Recording], tmp_path: Path, browse: Callable[..., str]
) -> None:
    hostile = "</script><script>document.title='hacked'</script>"
    export(record_story(hostile), ExportTarget.from_path(tmp_path / "report.html"))
    dom = browse(tmp_path / "report.html")
    table = re.search(r'<section><h2>Requests</h2>.*<div id="request-table">(.*?)</table>', dom, re.DOTALL)
    assert table
    assert table[1].count("<tr>") == 3
    assert "&lt;/script&gt;&lt;script&gt;document.title" in table[1]
    assert "<title>hacked" not in dom


DRAG_FILTER_AND_SORT = """
const svg = document.querySelector("svg[data-time]");
const box = svg.getBoundingClientRect();
const at = (share) => ({ button: 0, pointerId: 1, clientX: box.left + box.width * share, clientY: box.top + 20 });
svg.setPointerCapture = () => {};
svg.dispatchEvent(new PointerEvent("pointerdown", at(0.4)));
svg.dispatchEvent(new PointerEvent("pointermove", at(0.7)));
svg.dispatchEvent(new PointerEvent("pointerup", at(0.7)));
svg.dispatchEvent(new PointerEvent("pointermove", at(0.5)));
const buttons = Array.from(document.querySelectorAll("#request-table th button"));
buttons.find((each) => each.textContent === "Output").click();
const before = document.querySelector("#request-table tbody").innerText;
const filter = document.querySelector("#request-table input");
filter.value = "output>7";
filter.dispatchEvent(new Event("input"));
document.body.dataset.sorted = before.replace(/\\s+/g, " ");
"""


def test_report_in_a_browser_zooms_shows_values_sorts_and_filters(
    record_story: Callable[..., Recording], tmp_path: Path, browse: Callable[..., str]
) -> None:
    export(record_story(), ExportTarget.from_path(tmp_path / "report.html"))
    dom = browse(tmp_path / "report.html", DRAG_FILTER_AND_SORT)
    zoomed = re.search(r'<div class="zoom"><span[^>]*>([\d.]+) s to ([\d.]+) s</span>', dom)
    assert zoomed
    assert 0 < float(zoomed[1]) < float(zoomed[2]) < 2.6
    assert re.search(r'<div class="tip"[^>]*><b>[\d.]+ s</b><div class="key', dom), "values under the mouse"
    assert re.search(r'data-sorted="#1 slow .*#2 r2 ', dom), "8 output tokens before 6"
    table = re.search(r'<div id="request-table">(.*?)</table>', dom, re.DOTALL)
    assert table
    assert re.findall(r"#\d", table[1]) == ["#1"]
    assert "1 of 1 shown" in table[1]
