"""Export targets, and failed exports: a one-line message and no partial file."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.exports import export as exports
from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording


@pytest.mark.parametrize(
    ("name", "kind", "named"),
    [
        ("x.doc", None, "'x.doc' is not accepted: its name ends in one of .csv, .parquet, .arrow,"),
        ("metrics-requests.csv", None, "names several tables: choose one of metrics, requests with --kind"),
        ("report.html", "events", "a kind (events) goes with tables"),
    ],
)
def test_unclear_export_name_is_refused(name: str, kind: str | None, named: str) -> None:
    with pytest.raises(BadInput) as raised:
        ExportTarget.from_path(Path(name), kind)
    assert named in str(raised.value)
    assert (
        ExportTarget.from_path(Path("x.csv"), "events").kind
        == ExportTarget.from_path(Path("all-events.csv")).kind
        == "events"
    )


def test_table_name_without_a_kind_exports_metrics() -> None:
    assert ExportTarget.from_path(Path("Run.CSV")) == ExportTarget(Path("Run.CSV"), "metrics", ".csv")


@pytest.mark.parametrize(
    ("span", "named"),
    [
        ((99.0, None), "nothing to export from 99 s on"),
        ((2.0, 1.0), "the range from 2 s to 1 s is empty"),
        ((1.0, 1.0), "is empty"),
    ],
)
def test_export_range_without_any_time_is_refused(
    record_story: Callable[..., Recording], tmp_path: Path, span: tuple[float, float | None], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        export(record_story(), ExportTarget.from_path(tmp_path / "metrics.csv"), *span)
    assert [path.name for path in tmp_path.iterdir()] == ["story.mcap"]


def test_export_never_overwrites_a_file(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    recording = record_story()
    there = tmp_path / "metrics.csv"
    there.write_text("mine")
    with pytest.raises(BadInput, match="already exists"):
        export(recording, ExportTarget.from_path(there))
    assert there.read_text() == "mine"
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        export(recording, ExportTarget.from_path(tmp_path / "no" / "metrics.csv"))


def _disk_full(*args: Any) -> None:
    args[1].write(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def _cancelled(*args: Any) -> None:
    raise OpeningCancelled


@pytest.mark.parametrize(("fails", "error"), [(_disk_full, KvscopeError), (_cancelled, OpeningCancelled)])
def test_failed_export_leaves_no_file(
    record_story: Callable[..., Recording],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[..., None],
    error: type[Exception],
) -> None:
    recording = record_story()
    monkeypatch.setitem(exports.TABLE_FORMATS, ".csv", fails)
    with pytest.raises(error) as raised:
        export(recording, ExportTarget.from_path(tmp_path / "metrics.csv"))
    if error is KvscopeError:
        assert str(raised.value).endswith("metrics.csv' cannot be written: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["story.mcap"]
