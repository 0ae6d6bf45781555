"""Tests of `kvscope compare` without a window: table, JSON, CSV file, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.telemetry.conftest import record_in

from kvscope_app.command_line import Options, parse
from kvscope_app.main import COMMANDS, main

HEAVY = ("PySide6", "pyqtgraph", "torch", "triton", "transformers", "kvscope_engine")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of two recordings; the first is longer."""
    folder = tmp_path_factory.mktemp("pair")
    return str(record_in(folder, 1500, "a.mcap").path), str(record_in(folder, 600, "b.mcap").path)


def test_compare_table_works_without_display_and_qt(pair: tuple[str, str]) -> None:
    program = (
        "import sys\nfrom kvscope_app.main import main\n"
        f"code = main(['compare', *{pair!r}, '--table'])\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), code, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env={})
    assert done.stderr == "[] 0\n"
    assert "Tokens generated per second" in done.stdout


def test_compare_prints_the_table_if_there_is_no_display(pair: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "kvscope_app.main", "compare", *pair, "--from", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={})
    assert (done.returncode, done.stderr) == (0, "no display: printing the table only\n")
    assert "Tokens generated per second" in done.stdout


def test_compare_table_shows_both_files_and_equal_if_they_are_the_same(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"A  {pair[0]}"
    assert lines[1] == f"B  {pair[1]}"
    assert " ".join(lines[3].split()) == "A B Difference 95 % interval A over time B over time"
    assert main(["compare", pair[0], pair[0], "--table"]) == 0
    words = capsys.readouterr().out
    assert "settings differ" not in words
    assert "larger" not in words
    assert "equal" in words


def test_compare_writes_json_or_a_new_csv_file(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--json", "--from", "1", "--until", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["key"]: row for row in found["rows"]}
    assert rows["length_s"]["a"] == rows["length_s"]["b"] == 3
    assert rows["length_s"]["verdict"] == "equal"
    assert found["a"]["pool"]["num_blocks"] == 400
    target = tmp_path / "table.csv"
    assert main(["compare", *pair, "--csv", str(target)]) == 0
    assert len(target.read_text("utf-8").splitlines()) == 1 + len(rows)
    assert main(["compare", *pair, "--csv", str(target)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_compare_without_output_option_opens_the_window(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    wanted = parse(["compare", *pair, "--theme", "light"], COMMANDS)
    assert not isinstance(wanted, Options)
    assert wanted() == Options(theme="light", recordings=pair, is_comparison=True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["FILE"], "B.mcap"),
        (["FILE", "nowhere.mcap", "--table"], "'nowhere.mcap' cannot be read"),
        (["FILE", __file__, "--json"], "is not a recording"),
        (["FILE", "FILE", "--table", "--json"], "not allowed with"),
        (["FILE", "FILE", "--table", "--from", "1e6"], "nothing to export from 1e+06 s on"),
        (["FILE", "FILE", "--from", "1"], "--from and --until need"),
    ],
)
def test_compare_reports_bad_arguments_in_one_line(
    pair: tuple[str, str], words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [pair[0] if word == "FILE" else word for word in words]
    assert main(["compare", *given]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert printed.count("\n") == 1
