"""SQL over a recording: the ready questions, the values of the exports, restrictions, and errors in one line."""

from __future__ import annotations

import csv
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.telemetry.exports.conftest import HOSTILE

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.kinds import TABLE_NAMES
from kvscope_telemetry.exports.query.ready_questions import READY_QUESTIONS
from kvscope_telemetry.exports.query.recording_database import QueryInterrupted, RecordingDatabase
from kvscope_telemetry.exports.query.result_formats import as_table, as_text, json_lines
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import named_recording


@pytest.fixture(scope="module")
def sample() -> Iterator[RecordingDatabase]:
    with RecordingDatabase(Recording.open(named_recording(Path("sample")))) as database:
        yield database


@pytest.fixture
def story_database(record_story: Callable[..., Recording]) -> Iterator[RecordingDatabase]:
    with RecordingDatabase(record_story(HOSTILE)) as database:
        yield database


@pytest.mark.parametrize("question", READY_QUESTIONS, ids=lambda question: question.name)
def test_ready_question_has_an_answer_in_the_sample_recording(sample: RecordingDatabase, question: object) -> None:
    result = sample.query(question.sql)  # type: ignore[attr-defined]
    assert result.rows
    assert any(value is not None for row in result.rows for value in row)


def test_ready_questions_are_ten_and_also_run_where_little_is_known(story_database: RecordingDatabase) -> None:
    assert len(READY_QUESTIONS) == 10
    for question in READY_QUESTIONS:
        assert story_database.query(question.sql).names


@pytest.mark.parametrize("kind", TABLE_NAMES)
def test_query_of_a_table_has_the_columns_and_values_of_its_export(
    record_story: Callable[..., Recording], tmp_path: Path, kind: str
) -> None:
    recording = record_story()
    export(recording, ExportTarget.from_path(tmp_path / f"{kind}.csv"))
    with (tmp_path / f"{kind}.csv").open(encoding="utf-8-sig", newline="") as file:
        header, *exported = csv.reader(file)
    columns = [index for index, name in enumerate(header) if not name.endswith("_utc")]
    with RecordingDatabase(recording) as database:
        result = database.query(f"select * from {kind}")
    assert result.names == tuple(header[index] for index in columns)
    found = [["" if value is None else str(value) for value in row] for row in result.rows]
    assert found == [[row[index] for index in columns] for row in exported]


def test_every_column_has_a_description(sample: RecordingDatabase) -> None:
    described = sample.query("select table_name, column_name, comment from duckdb_columns() where not internal").rows
    assert {table for table, _, _ in described} == set(TABLE_NAMES)
    assert [row for row in described if not row[2]] == []


def test_steps_have_their_batch_and_durations(story_database: RecordingDatabase) -> None:
    result = story_database.query("select step, num_requests, total_ns, forward_ns, flops, moved_bytes from steps")
    assert result.rows == [(step, 1, 10_000_000, 7_000_000, 14, 21) for step in range(1, 9)]


def test_query_of_a_range_has_only_its_steps(record_story: Callable[..., Recording]) -> None:
    with RecordingDatabase(record_story(), from_s=0.25, until_s=1.0) as database:
        assert database.query("select step from steps").rows == [(3,), (4,), (5,), (6,)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("selec 1", 'Parser Error: syntax error at or near "selec"'),
        ("select nummer from requests", '"nummer" not found in FROM clause! Candidate bindings: "number"'),
        ("select * from nope", "there is no table 'nope': the tables are metrics, requests, steps"),
        ("select 1; select 2", "2 SQL statements are not accepted"),
        (" -- nothing", "0 SQL statements are not accepted"),
        ("select * from steps where step = ?", "Values were not provided"),
        ("drop table requests", "DROP is not accepted"),
        ("explain analyze delete from requests", "read-only"),
        ("select list(range) from range(200000000)", "more than 1 GB of memory"),
    ],
)
def test_bad_sql_is_refused_in_one_line(sample: RecordingDatabase, sql: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        sample.query(sql)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{file}')",
        "select * from read_text('{file}')",
        "select * from '{file}'",
        "select * from glob('{folder}/*')",
        "copy (select 1) to '{folder}/new.csv'",
        "attach '{folder}/new.db'",
        "export database '{folder}/new'",
        "install httpfs",
        "load httpfs",
        "set memory_limit = '99GB'",
        "set enable_external_access = true",
        "select * from visible_in_this_process",
    ],
)
def test_query_has_no_access_outside_of_the_recording(sample: RecordingDatabase, tmp_path: Path, sql: str) -> None:
    visible_in_this_process = {"x": [1]}
    assert visible_in_this_process
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput):
        sample.query(sql.format(file=tmp_path / "secret.csv", folder=tmp_path))
    assert os.listdir(tmp_path) == ["secret.csv"]


def test_query_changes_no_later_answer(sample: RecordingDatabase) -> None:
    before = sample.query("select count(*) from requests").rows
    with pytest.raises(BadInput):
        sample.query("explain analyze delete from requests")
    assert sample.query("select count(*) from requests").rows == before
    assert sample.query("pivot requests on state using count(*) group by epoch").rows


def test_running_query_can_be_stopped_from_another_thread(sample: RecordingDatabase) -> None:
    is_done = threading.Event()

    def stop_repeatedly() -> None:
        while not is_done.wait(0.05):
            sample.interrupt()

    thread = threading.Thread(target=stop_repeatedly)
    thread.start()
    try:
        with pytest.raises(QueryInterrupted):
            sample.query("select count(*) from range(1000000000) a, range(1000000000) b")
    finally:
        is_done.set()
        thread.join()
    assert sample.query("select 1").rows == [(1,)]


def test_list_of_numbers_is_exported_as_text(sample: RecordingDatabase) -> None:
    (column,) = as_table(sample.query("select list(1.5) as a")).columns
    assert (column.type, list(column.values)) == ("text", ["[1.5]"])


def test_limit_leaves_out_rows_and_says_so(sample: RecordingDatabase) -> None:
    result = sample.query("select number from requests order by number", max_rows=2)
    assert (result.rows, result.has_more) == ([(1,), (2,)], True)
    assert not sample.query("select 1 as a", max_rows=1).has_more


def test_missing_duckdb_is_explained_in_one_line(
    monkeypatch: pytest.MonkeyPatch, record_story: Callable[..., Recording]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BadInput, match=r"^queries need duckdb, which is not installed: pip install 'kvscope\[query\]'$"
    ):
        RecordingDatabase(record_story())


def test_formats_show_unknown_values_as_unknown_and_names_once(sample: RecordingDatabase) -> None:
    result = sample.query(
        "select 1 as a, 2.5 as a, null::bigint as b, null::double as c, [1, null] as d, {'k': 1} as e,"
        " date '2026-01-02' as f, 170141183460469231731687303715884105727::hugeint as g, 'x\ny' as h,"
        " 'inf'::double as i"
    )
    assert result.names == ("a", "a_2", "b", "c", "d", "e", "f", "g", "h", "i")
    assert list(json_lines(result))[1] == (
        '{"a": 1, "a_2": 2.5, "b": null, "c": null, "d": [1, null], "e": {"k": 1}, "f": "2026-01-02",'
        ' "g": 170141183460469231731687303715884105727, "h": "x\\ny", "i": null}'
    )
    header, row = as_text(result).splitlines()
    assert row.split()[:4] == ["1", "2.5", "–", "–"]
    assert "x?y" in row
    assert len(header) >= len("a  a_2  b  c")
    assert [column.type for column in as_table(result).columns] == [
        *("int", "float", "int", "float", "text", "text", "text", "text", "text", "float"),
    ]
