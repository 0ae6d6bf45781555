"""The structure of the code follows ARCHITECTURE.md: no import cycles, and paths that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "kvscope_app",
    "kvscope_engine",
    "kvscope_inside",
    "kvscope_telemetry",
    "kvscope_kernels",
    "kvscope_resources",
)


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The imports of each module within our packages, including those for types."""
    graph = grimp.build_graph(*PACKAGES)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def sources() -> list[Path]:
    """Return our modules without `__init__.py` files that only describe a folder."""
    folders = [ROOT / name for name in ("app", "engine", "kernels", "resources")]
    return [path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"]


def test_files_have_no_import_cycles(imports: dict[str, set[str]]) -> None:
    """Remove modules that import nothing left, and those that nothing left imports, repeatedly: cycles remain."""
    left = dict(imports)
    while True:
        imported = set().union(*left.values()) if left else set()
        settled = {module for module, others in left.items() if not others & left.keys() or module not in imported}
        if not settled:
            break
        left = {module: others - settled for module, others in left.items() if module not in settled}
    assert not left, f"in an import cycle, or between two of them: {sorted(left)}"


@pytest.fixture(scope="module")
def present() -> set[str]:
    """Our files and folders, including tests and scripts."""
    files = [*sources(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    folders = {parent for path in files for parent in path.parents if ROOT in parent.parents}
    return {str(path.relative_to(ROOT)) for path in files} | {f"{folder.relative_to(ROOT)}/" for folder in folders}


INTERNALS = sorted(f"docs/internals/{path.name}" for path in ROOT.glob("docs/internals/*.md"))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "ARCHITECTURE.md", *INTERNALS])
def test_paths_named_in_documents_exist(name: str, present: set[str]) -> None:
    named = set(re.findall(r"`((?:[a-z0-9_]+/)+|(?:[a-z0-9_]+/)*[a-z0-9_]+\.py)`", (ROOT / name).read_text("utf-8")))
    assert named
    missing = [path for path in named if not any(f"/{known}".endswith(f"/{path}") for known in present)]
    assert not missing, f"{name} names paths that do not exist: {missing}"


MAKERS = {
    "Frame": {"engine/kvscope_telemetry/producer/frame_builder.py"},
    "Snapshot": {
        "engine/kvscope_telemetry/producer/frame_builder.py",
        "engine/kvscope_telemetry/messages/wire.py",  # decodes it
        "engine/kvscope_telemetry/recordings/keyframes.py",  # of a mirror
    },
}


@pytest.mark.parametrize("message", MAKERS)
def test_frame_and_snapshot_messages_are_created_only_in_the_listed_source_files(message: str) -> None:
    pattern = re.compile(rf"(?<!class )\b{message}\(")
    makers = {str(path.relative_to(ROOT)) for path in sources() if pattern.search(path.read_text("utf-8"))}
    assert makers == MAKERS[message]


def test_public_class_names_are_defined_once() -> None:
    """A search for a class must find one class: a name that is used twice says too little in both places.

    No name is exempt. A class that only its module uses may start with an underscore instead.
    """
    owners = defaultdict(list)
    for path in ROOT.glob("*/kvscope_*/**/*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(str(path.relative_to(ROOT)))
    assert owners, "found no classes"
    several = {name: sorted(paths) for name, paths in owners.items() if len(paths) > 1}
    assert not several, f"public classes that share a name: {several}"
