"""The documentation: commands are accepted by their parsers, links are valid, pages are short, and the site builds."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope_app.command_line import build_parser as desktop_parser
from kvscope_app.main import COMMANDS
from kvscope_engine.cli.bench import benchmark_names
from kvscope_engine.cli.main import build_parser as engine_parser
from kvscope_engine.command_parser import CommandParser

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FENCE = re.compile(r"```(?:sh|bash|)\n(.*?)```", re.DOTALL)
_LIMITS = {"README.md": 5000, "ARCHITECTURE.md": 8000, "CHANGELOG.md": 6000, "CONTRIBUTING.md": 9000}


_WAYS = ("block", "token", "command", "frame")
_RECORD_PARTS = ["Context", "Decision", "Consequences", "Rejected", "Reconsider"]


def _commands() -> list[tuple[str, str]]:
    """Return page and line of each of our commands in a shell block; a line of Markdown may be indented."""
    found = []
    for page in PAGES:
        for block in _FENCE.findall(page.read_text("utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(kvscope(-engine)?( |$)|python -m benchmarks\.)", line):
                    found.append((str(page.relative_to(ROOT)), line.strip()))
    return found


@pytest.mark.parametrize(("page", "line"), _commands())
def test_documented_command_is_accepted(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[: next((at for at, word in enumerate(words) if word in ("<", ">", "|", "&&")), len(words))]
    words = [word for word in words if word not in ("[ADDRESS", "…]")]
    program, *arguments = words
    if program == "python":
        parser, arguments = _developers_benchmark(arguments[1]), arguments[2:]
    elif arguments[:1] == ["bench"] and program == "kvscope-engine":
        parser, arguments = _benchmark(arguments[1]), arguments[2:]
    else:
        parser = desktop_parser(COMMANDS) if program == "kvscope" else engine_parser()
    assert isinstance(parser.parse_args(arguments), argparse.Namespace)


def _benchmark(name: str) -> argparse.ArgumentParser:
    assert name in benchmark_names()
    parser = CommandParser()
    importlib.import_module(f"kvscope_engine.bench.{name.replace('-', '_')}").add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return parser


def _developers_benchmark(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(module).add_arguments(parser)
    return parser


def test_command_pattern_finds_over_60_commands_in_the_guides() -> None:
    """Otherwise the pattern above would find nothing, and every test would pass."""
    assert len(_commands()) > 60


@pytest.mark.parametrize(("name", "limit"), _LIMITS.items())
def test_documentation_page_does_not_exceed_its_length_limit(name: str, limit: int) -> None:
    assert len((ROOT / name).read_bytes()) <= limit


def test_list_of_terms_in_the_documentation_has_at_most_20_entries() -> None:
    terms = (ROOT / "docs/internals/terms.md").read_text("utf-8")
    rows = [line for line in terms.splitlines() if line.startswith("| ")]
    assert 1 < len(rows) - 1 <= 20  # one row is the table's header


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


_RECORDS = sorted(ROOT.glob("docs/internals/decisions/[0-9]*.md"))


@pytest.mark.parametrize("record", _RECORDS, ids=lambda record: record.stem)
def test_decision_record_is_short_and_complete(record: Path) -> None:
    text = record.read_text("utf-8")
    assert len(text.splitlines()) <= 30
    assert re.findall(r"^\*\*(\w+)", text, re.MULTILINE) == _RECORD_PARTS
    assert re.search(r"\d", text.partition("**Consequences.**")[2].partition("**Rejected")[0])
    assert f"\n{record.stem}\n" in (record.parent / "index.md").read_text("utf-8")


@pytest.mark.parametrize("record", _RECORDS, ids=lambda record: record.stem)
def test_code_of_a_decision_links_to_its_record(record: Path) -> None:
    files = re.findall(r"\]\(([^)]+)\)", record.read_text("utf-8").rpartition("\nCode: ")[2])
    assert files
    for file in files:
        assert str(record.relative_to(ROOT)) in (record.parent / file).read_text("utf-8")


def test_decision_records_are_numbered_without_gaps() -> None:
    assert [int(record.stem[:4]) for record in _RECORDS] == list(range(1, len(_RECORDS) + 1))


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed: pip install '.[docs]'")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*build, str(ROOT / "docs"), str(tmp_path / "html")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "html" / "reference" / "kvscope-engine.html").read_text("utf-8")
    assert "--gpu-memory-utilization" in reference
    assert str(Path.home()) not in reference
    python = (tmp_path / "html" / "reference" / "python.html").read_text("utf-8")
    for package in map(importlib.import_module, ("kvscope_engine", "kvscope_telemetry", "kvscope_inside")):
        assert [name for name in package.__all__ if f'id="{package.__name__}.{name}"' not in python] == []


def test_code_paths_in_the_architecture_equal_the_traced_ones() -> None:
    said = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## Four ways")[2].partition("\n## ")[0]
    lists = [part.partition("`. ")[0] for part in re.findall(r"```\n\n(kvscope_.*?)(?=\n\n|\Z)", said, re.DOTALL)]
    assert len(lists) == len(_WAYS)
    for name, text in zip(_WAYS, lists, strict=True):
        package, files = "", []
        for is_package, word in re.findall(r"(?:(kvscope_\w+):)|`([^`]+)`?", text):
            package = is_package or package
            files += [f"{package}/{word}"] if word else []
        assert files == [path.partition("/")[2] for path in _traced(name)], name


def _traced(name: str) -> tuple[str, ...]:
    """Return the files that the test of a code path expects; it is parsed, because importing it would import torch."""
    tree = ast.parse((ROOT / f"tests/end_to_end/test_way_of_a_{name}.py").read_text("utf-8"))
    (way,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "WAY")
    found: tuple[str, ...] = ast.literal_eval(way or ast.Constant(()))
    return found
