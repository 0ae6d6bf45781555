"""Finished plans in kvscope's cache, so that a question which was answered before is answered without importing torch.

A stored plan is used while the model's configuration, the options, kvscope's source files, and the versions of torch
and transformers are the same. Must not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope_engine.json_cache import read_entry, write_entry
from kvscope_engine.model.loader.download.default_model import default_gguf_path
from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_telemetry.messages.memory_plan import PlanAnswer
from kvscope_telemetry.program_version import program_version

_KIND: Final = "plans"
_PACKAGES: Final = ("kvscope_engine", "kvscope_kernels", "kvscope_telemetry")
_SOURCES: Final = (".py", ".c", ".h")


def plan_identity(model: str, options: dict[str, Any]) -> str:
    """Return a text of everything that determines the plan of `model`.

    Returns "" if that is unknown: for a model on the Hub, whose configuration may change.

    Raises BadInput for a name that is not a model's.
    """
    config = _config_identity(model)
    if not config:
        return ""
    return json.dumps({"model": model, "config": config, "options": options, "program": _program_identity()})


def stored_answers(identity: str, report: Callable[[str], None]) -> list[PlanAnswer]:
    """Return the answers that were stored under `identity`; empty if there are none.

    `report` is called with a line about a damaged entry.
    """
    stored = read_entry(_KIND, identity, report) if identity else None
    try:
        return [] if stored is None else msgspec.convert(stored, list[PlanAnswer])
    except msgspec.ValidationError:
        return []


def store_answers(identity: str, answers: list[PlanAnswer]) -> None:
    if identity:
        write_entry(_KIND, identity, msgspec.to_builtins(answers))


def _config_identity(model: str) -> list[Any]:
    """Return the content of the file that describes the model, or the identity of a GGUF file; empty if unknown."""
    path = Path(model).expanduser() if model.endswith(".json") else None
    if path is None or not path.is_file():
        name = parse_model_name(model)
        path = {
            "dummy": name.path,
            "folder": name.path / "config.json",
            "gguf": name.path,
            "default": default_gguf_path(),
        }.get(name.kind)
    if path is None or not path.is_file():
        return []
    if path.suffix == ".json":
        return [hashlib.sha256(path.read_bytes()).hexdigest()]
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]


def _program_identity() -> list[Any]:
    """Return versions, and a hash of the sizes and times of kvscope's source files, which change in a checkout."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in map(Path, (spec.submodule_search_locations if spec is not None else None) or ()):
            for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
                status = path.stat()
                digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return [program_version(), *map(_version, ("torch", "transformers")), digest.hexdigest()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
