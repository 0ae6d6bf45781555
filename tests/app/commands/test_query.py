"""Tests of `kvscope query`: text, JSON and CSV output, ready questions, and one-line errors for bad arguments."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.telemetry.exports.conftest import HOSTILE, record_story

from kvscope_app.main import main
from kvscope_telemetry.exports.query.ready_questions import READY_QUESTIONS

__all__ = ["record_story"]

HEAVY = ("PySide6", "pyqtgraph", "torch", "triton", "transformers", "kvscope_engine")


@pytest.fixture
def recording(record_story: Callable) -> str:  # type: ignore[type-arg]
    return str(record_story("\x1b[31m" + HOSTILE).path)


def test_query_works_without_display_qt_and_torch(recording: str) -> None:
    program = (
        "import sys\nfrom kvscope_app.main import main\n"
        f"code = main(['query', {recording!r}, 'latencies'])\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), code, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env={})
    assert done.stderr == "[] 0\n"
    assert done.stdout.startswith("latency ")


def test_query_prints_a_table_json_or_csv(
    recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "select number, request_id, total_ns from requests order by number"
    assert main(["query", recording, sql]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["number", "request_id", "total_ns"]
    assert "\x1b" not in first
    assert second.split() == ["2", "r2", "–"]
    assert main(["query", recording, "--json", sql]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["request_id"] == "\x1b[31m" + HOSTILE
    assert found[1] == {"number": 2, "request_id": "r2", "total_ns": None}
    monkeypatch.setattr(sys, "stdin", io.StringIO(sql))
    assert main(["query", recording, "-", "--csv", str(tmp_path / "new.csv")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new.csv'}: 2 rows\n"
    assert (tmp_path / "new.csv").read_text("utf-8-sig").splitlines()[2] == "2,r2,"
    assert main(["query", recording, sql, "--csv", str(tmp_path / "new.csv")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_query_says_that_rows_are_left_out(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", recording, "select * from steps", "--limit", "3"]) == 0
    *_, note = lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert note.startswith("only the first 3 rows are shown")
    assert main(["query", recording, "select * from devices"]) == 0
    assert capsys.readouterr().out == "no rows\n"


def test_list_prints_the_ready_questions_with_their_sql(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["query", "--list"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for question in READY_QUESTIONS:
        assert f"{question.name}: {question.title}" in printed
        assert question.sql.splitlines()[0] in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["FILE"], "QUERY"),
        (["FILE", "slowest"], "'slowest' is not accepted: a query is a SELECT statement or a ready question: slowest-"),
        (["FILE", "selec 1"], "Parser Error"),
        (["FILE", "latencies", "--limit", "0"], "'0' is not accepted: a number of rows, 1 or more"),
        (["FILE", "latencies", "--json", "--csv", "x.csv"], "not allowed with"),
        (["FILE", "latencies", "--from", "1e6"], "nothing to export from 1e+06 s on"),
        (["nowhere.mcap", "latencies"], "'nowhere.mcap' cannot be read"),
    ],
)
def test_bad_arguments_are_reported_in_one_line(
    recording: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", *(recording if word == "FILE" else word for word in words)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
