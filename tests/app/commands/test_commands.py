"""Tests of `kvscope info`, `export` and `recover`: their output, and one-line errors for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.telemetry.conftest import record

from kvscope_app.main import main

__all__ = ["record"]

LIGHT = ("info FILE", "info FILE --json", "export FILE --out DIR/metrics.csv", "recover FILE --out DIR/new.mcap")
HEAVY = ("PySide6", "pyqtgraph", "torch", "triton", "transformers", "kvscope_engine", "pyarrow")


@pytest.mark.parametrize("words", [*LIGHT, "export FILE --out DIR/r.html", "export FILE --out DIR/t.perfetto-trace"])
def test_commands_work_without_display_qt_and_torch(record: Callable, tmp_path: Path, words: str) -> None:  # type: ignore[type-arg]
    given = words.replace("FILE", str(record(200).path)).replace("DIR", str(tmp_path)).split()
    program = (
        "import sys\nfrom kvscope_app.main import main\n"
        f"code = main({given!r})\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), code, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env={})
    assert done.stderr == "[] 0\n"
    assert done.stdout


def test_info_prints_text_or_json(record: Callable, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[type-arg]
    path = record(600).path
    assert main(["info", str(path)]) == 0
    words = capsys.readouterr().out
    assert "400 blocks of 16 tokens" in words
    assert "600 of 1 engine start, 600 steps" in words
    assert words.splitlines()[-1].endswith("MB, complete")
    assert main(["info", "sample"]) == 0
    assert "allocator paged" in capsys.readouterr().out, "the bundled sample"
    assert main(["info", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_frames"] == found["num_steps"] == 600
    assert found["is_complete"] is True
    assert 0 < found["mean_usage"] < found["peak_usage"] <= 1
    assert found["totals"]["decode_tokens"] > 1000


def test_info_reports_a_truncated_file(record: Callable, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[type-arg]
    path = record(600).path
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert main(["info", str(path)]) == 0
    assert "Truncated; recovered to the last complete chunk." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["info"], "FILE.mcap"),
        (["info", "nowhere.mcap"], "'nowhere.mcap' cannot be read"),
        *(
            (
                [*words, "nowhere"],
                "'nowhere' cannot be read: No such file or directory; accepted are a recording's path",
            )
            for words in (["info"], ["export", "--out", "x.csv"], ["recover"], ["replay"], ["compare", "sample"])
        ),
        (["--open", "nowhere"], "(FILE.mcap or FILE.mcap.part) and the words sample and sample-hybrid"),
        (["info", __file__], "is not a recording"),
        (["infos", "x"], "'infos'"),
        (["--theme", "dark", "info", "x"], "info x"),
        (["export", "FILE"], "--out"),
        (["export", "FILE", "--out", "x.doc"], "'x.doc'"),
        (["export", "FILE", "--out", "x.doc"], ".csv, .parquet, .arrow, .html, .perfetto-trace, .pftrace, .png, .svg"),
        (["export", "FILE", "--out", "x.csv", "--kind", "all"], "'all'"),
        (["export", "FILE", "--out", "metrics.csv", "--from", "soon"], "'soon'"),
        (["export", "FILE", "--out", "metrics.csv", "--from", "nan"], "'nan'"),
        (["export", "FILE", "--out", "metrics.csv", "--from", "500"], "500 s"),
        (["export", "FILE", "--out", "FILE"], "session.mcap"),
        (["export", "FILE", "--to", "video", "--out", "x.png"], "'x.png'"),
        (["export", "FILE", "--to", "pdf", "--out", "x.pdf"], "'pdf'"),
        (["export", "FILE", "--out", "x.png", "--speed", "2"], "--speed"),
        (["export", "FILE", "--out", "x.png", "--view", "console"], "'console'"),
        (["export", "FILE", "--out", "x.png", "--size", "9x9"], "'9x9'"),
        (["export", "FILE", "--out", "x.png", "--at", "700"], "--at 700"),
        (["export", "FILE", "--out", "x.apng", "--fps", "100"], "'100'"),
        (["export", "FILE", "--out", "x.apng", "--view", "events"], "events"),
        (["export", "FILE", "--out", "metrics.csv", "--theme", "dark"], "--theme"),
        (["recover", "FILE", "--out", "FILE"], "the input file"),
        (["recover", "FILE", "--out", "new.txt"], "'new.txt'"),
        (["record", "ipc:///x/telemetry"], "--out"),
        (["record", "http://x", "--out", "x.mcap"], "'http://x'"),
        (["record", "ipc:///x/telemetry", "--out", "x.txt"], "'x.txt'"),
        (["record", "ipc:///x/telemetry", "--out", "x.mcap", "--seconds", "0"], "'0'"),
        (["record", "ipc:///x/telemetry", "--out", "x.mcap", "--segment-bytes", "many"], "'many'"),
        (["record", "ipc:///x/telemetry", "--out", "no/x.mcap"], "no/x.mcap"),
        (["record", "ipc:///x/telemetry", "--out", "x.mcap", "--key", "nokey"], "nokey"),
        (["top", "--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_prints_one_line_with_the_offending_value(
    record: Callable,  # type: ignore[type-arg]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "FILE" in words:
        record(60)
    assert main([word.replace("FILE", "session.mcap") for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvscope: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert {path.name for path in tmp_path.iterdir()} <= {"session.mcap"}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    words = capsys.readouterr().out
    assert words.startswith("usage: kvscope [options]\n       kvscope COMMAND ...")
    assert all(f"\n    {name} " in words for name in ("info", "record", "export", "recover", "top"))


def test_export_uses_the_to_option_and_recover_writes_a_file_named_recovered(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = record(60).path
    assert main(["export", str(path), "--to", "csv", "--out", str(tmp_path / "run.txt")]) == 0
    assert (tmp_path / "run.txt").read_text("utf-8-sig").startswith("time")
    assert main(["export", str(path), "--to", "perfetto", "--out", str(tmp_path / "run")]) == 0
    assert main(["recover", str(path)]) == 0
    assert (tmp_path / "session-recovered.mcap").exists()


def test_recovered_sample_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recover", "sample"]) == 0
    assert (tmp_path / "sample-recovered.mcap").exists()
