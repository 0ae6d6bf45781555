"""Tables read back by other libraries: CSV by the standard library, Parquet and Arrow by pyarrow."""

from __future__ import annotations

import csv
import re
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tests.processes import make_named_pipe

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.kinds import TABLE_NAMES
from kvscope_telemetry.exports.tables import arrow_files
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import new_bookmark

HOSTILE = '=1+1 "<script>alert(1)</script>'


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "kind", [kind for kind in TABLE_NAMES if kind != "devices"]
)  # kinds without devices in this recording
def test_all_table_formats_hold_the_same_values(record: Callable, tmp_path: Path, kind: str) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(600).path)
    marks = [new_bookmark(recording.start_ns + at * 10**9, "a note") for at in range(8)]
    for suffix in (".csv", ".parquet", ".arrow"):
        export(recording, ExportTarget.from_path(tmp_path / f"{kind}{suffix}"), bookmarks=marks)
    rows = read_csv(tmp_path / f"{kind}.csv")
    from_parquet = parquet.read_table(tmp_path / f"{kind}.parquet")
    with pa.memory_map(str(tmp_path / f"{kind}.arrow")) as file:
        from_arrow = pa.ipc.open_file(file).read_all()
    assert from_parquet.schema.equals(from_arrow.schema, check_metadata=True)
    assert from_parquet.equals(from_arrow)
    assert from_parquet.num_rows == len(rows) > 5
    readable = {name.removesuffix("_ns") + "_utc" for name in from_parquet.column_names if _is_time(from_parquet, name)}
    assert from_parquet.column_names == [name for name in rows[0] if name not in readable]
    for name in from_parquet.column_names:
        column = from_parquet.column(name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.int64())
        found = ["" if value is None else str(value) for value in column.to_pylist()]
        assert found == [row[name] for row in rows], name


def _is_time(table: pa.Table, name: str) -> bool:
    return pa.types.is_timestamp(table.schema.field(name).type)


def test_csv_file_has_a_byte_order_mark_and_times_that_a_spreadsheet_reads(
    record_story: Callable[..., Recording], tmp_path: Path
) -> None:
    export(record_story("naïve\0"), ExportTarget.from_path(tmp_path / "requests.csv"))
    assert (tmp_path / "requests.csv").read_bytes().startswith(b"\xef\xbb\xbf")
    row = read_csv(tmp_path / "requests.csv")[0]
    assert row["request_id"] == "naïve\ufffd"
    read_back = datetime.fromisoformat(f"{row['arrival_time_utc']}+00:00")
    assert int(read_back.timestamp() * 1000) == int(row["arrival_time_ns"]) // 1_000_000


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow", "perfetto", "html"])
def test_export_to_a_named_pipe_has_the_bytes_of_the_file_without_a_byte_order_mark(
    record_story: Callable[..., Recording], tmp_path: Path, form: str
) -> None:
    recording, pipe = record_story(), tmp_path / "pipe"
    make_named_pipe(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    export(recording, ExportTarget.from_path(pipe, form=form))
    reader.join(60)
    export(recording, ExportTarget.from_path(tmp_path / "file", form=form))
    assert read == [(tmp_path / "file").read_bytes().removeprefix(b"\xef\xbb\xbf")]
    assert pipe.is_fifo()


def test_metrics_table_has_types_and_units(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(600).path)
    export(recording, ExportTarget.from_path(tmp_path / "metrics.parquet"))
    schema = parquet.read_schema(tmp_path / "metrics.parquet")
    assert schema.field("time_ns").type == pa.timestamp("ns", tz="UTC")
    assert schema.field("run_ns").type == pa.int64()
    assert schema.field("usage").type == schema.field("first_token_p95_s").type == pa.float64()
    units = {field.name: (field.metadata or {}).get(b"unit", b"").decode() for field in schema}
    assert [units[name] for name in ("run_ns", "active_blocks", "decode_tokens", "usage")] == [
        "ns",
        "blocks",
        "tokens",
        "share",
    ]
    without = [name for name, unit in units.items() if not unit]
    assert all(re.fullmatch(r"epoch|step|\w+_count", name) for name in without), without
    assert schema.metadata[b"model"] == b"simulated"
    overview, table = read_overview(recording), parquet.read_table(tmp_path / "metrics.parquet")
    np.testing.assert_array_equal(table.column("decode_tokens"), overview.column("decode_tokens"))
    assert table.column("temperature_celsius").null_count == len(overview)


def test_requests_table_has_the_history_of_each_request(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    recording = record_story(HOSTILE)
    export(recording, ExportTarget.from_path(tmp_path / "requests.csv"))
    first, second = read_csv(tmp_path / "requests.csv")
    assert first["request_id"] == f"'{HOSTILE}"  # quoted, so that no spreadsheet evaluates it as a formula
    assert (first["queue_ns"], first["first_token_ns"], first["preempted_ns"]) == (
        "100000000",
        "150000000",
        "300000000",
    )
    assert (first["state"], first["end_reason"], first["total_ns"]) == ("finished", "reached its limit", "1400000000")
    assert (second["state"], second["total_ns"]) == ("running", "")
    assert (first["adapter"], second["adapter"]) == ("sql", "")
    export(recording, ExportTarget.from_path(tmp_path / "requests.parquet"))
    assert parquet.read_table(tmp_path / "requests.parquet").column("request_id")[0].as_py() == HOSTILE


def test_achieved_rates_are_work_divided_by_step_time(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    """Each step of the story does 14 operations, moves 21 bytes in 7 ms, and proposes two draft tokens of which one is
    accepted.
    """
    recording = record_story()
    export(recording, ExportTarget.from_path(tmp_path / "metrics.csv"))
    rows = [row for row in read_csv(tmp_path / "metrics.csv") if int(row["num_steps"])]
    assert sum(int(row["flops"]) for row in rows) == 14 * sum(int(row["num_steps"]) for row in rows)
    assert {(row["achieved_flops_per_s"], row["achieved_bytes_per_s"]) for row in rows} == {("2000.0", "3000.0")}
    drafts, right = (sum(int(row[name]) for row in rows) for name in ("draft_tokens", "accepted_tokens"))
    assert drafts == 2 * right > 0


def test_exported_tables_of_a_time_range_have_only_rows_within_it(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(1500).path)
    for kind in TABLE_NAMES:
        export(recording, ExportTarget.from_path(tmp_path / f"{kind}.csv"), 20.0, 30.0)
    metrics, events = read_csv(tmp_path / "metrics.csv"), read_csv(tmp_path / "events.csv")
    assert 10 <= len(metrics) <= 12
    assert all(20 <= float(row["second_s"]) <= 30 for row in events)
    requests = read_csv(tmp_path / "requests.csv")
    assert all(float(row["arrival_s"]) <= 30 for row in requests)
    everything = {row["number"] for row in events if row["kind"] in ("admitted", "finished", "preempted")}
    assert everything <= {row["number"] for row in requests}


def test_missing_pyarrow_is_explained_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrow_files.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(
        BadInput, match=r"^\.parquet needs pyarrow, which is not installed: pip install 'kvscope\[export\]'"
    ):
        ExportTarget.from_path(tmp_path / "metrics.parquet")
    ExportTarget.from_path(tmp_path / "metrics.csv")
