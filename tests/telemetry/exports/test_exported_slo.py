"""Requests that missed their latency goals: the report and `kvscope info` agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.telemetry.exports.conftest import HOSTILE

from kvscope_app.main import main
from kvscope_telemetry.recordings.reader import Recording

Tell = Callable[..., Recording]


def test_info_lists_missed_requests_and_their_delays(record_story: Tell, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(record_story().path)
    assert main(["info", path, "--goodput", "ttft:149", "tpot:200"]) == 0
    words = capsys.readouterr().out.splitlines()
    at = next(place for place, line in enumerate(words) if line.startswith("goodput"))
    assert words[at].split(maxsplit=1)[1] == "0.0% of 1 finished requests kept TTFT 149 ms and TPOT 200 ms"
    assert words[at + 1].split(maxsplit=1)[1] == "#1 TTFT 150.0 ms, goal 149 ms"
    chain = [line.strip() for line in words[at + 2 :]]
    assert chain[0] == "waited 100.0 ms"
    assert chain[2].startswith("swapped out for #2, 300.0 ms aside: request #2 needed 3 blocks")
    assert chain[3] == "recomputed 1 token"
    assert main(["info", path, "--json", "--goodput", "ttft:149"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert (found["share"], found["num_judged"], found["num_missed"]) == (0.0, 1, 1)
    assert found["missed"][0]["ttft_ms"] == pytest.approx(150)
    assert found["missed"][0]["tpot_ms"] == pytest.approx(1250 / 7)
    assert found["missed"][0]["chain"] == chain


def test_info_does_not_list_requests_that_met_the_goals(record_story: Tell, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(record_story().path)
    assert main(["info", path, "--goodput", "ttft:151", "tpot:200", "e2el:2000"]) == 0
    words = capsys.readouterr().out
    assert "100.0% of 1 finished requests" in words
    assert "missed" not in words
    assert main(["info", path]) == 0
    assert "goodput" not in capsys.readouterr().out


def test_report_lists_missed_requests_with_escaped_names(record_story: Tell, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    recording = record_story(HOSTILE)
    assert main(["export", str(recording.path), "--out", str(out), "--goodput", "tpot:50"]) == 0
    page = out.read_text("utf-8")
    assert "Latency goals" in page
    assert "TPOT 178.6 ms, goal 50 ms" in page
    assert "swapped out for #2, 300.0 ms aside" in page
    assert HOSTILE not in page
    plain = tmp_path / "plain.html"
    assert main(["export", str(recording.path), "--out", str(plain)]) == 0
    assert "Latency goals" not in plain.read_text("utf-8")


@pytest.mark.parametrize(
    ("out", "goal", "named"),
    [
        ("report.html", "itl:5", "--goodput 'itl:5' is not accepted: ttft, tpot, e2el with milliseconds"),
        ("metrics.csv", "ttft:5", "--goodput goes with .html, not with .csv"),
        ("map.png", "ttft:5", "--goodput goes with .html, not with a picture"),
    ],
)
def test_unusable_goodput_option_is_explained_in_one_line(
    record_story: Tell, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, goal: str, named: str
) -> None:
    more = ["--view", "memory"] if out.endswith(".png") else []
    assert main(["export", str(record_story().path), "--out", str(tmp_path / out), "--goodput", goal, *more]) != 0
    assert named in capsys.readouterr().err
    assert not (tmp_path / out).exists()
