"""Finished plans in kvscope's cache, so that a question which was answered before is answered without importing torch.

A stored plan is used while the model's configuration, the options, kvscope's source files, and the versions of torch
and transformers are the same. Must not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope_engine.json_cache import read_entry, write_entry
from kvscope_engine.model.loader.download.default_model import default_gguf_path
from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_engine.program_identity import program_identity
from kvscope_telemetry.messages.memory_plan import PlanAnswer

_KIND: Final = "plans"


def plan_identity(model: str, options: dict[str, Any]) -> str:
    """Return a text of everything that determines the plan of `model`.

    Returns "" if that is unknown: for a model on the Hub, whose configuration may change.

    Raises BadInput for a name that is not a model's.
    """
    config = _config_identity(model)
    if not config:
        return ""
    return json.dumps({"model": model, "config": config, "options": options, "program": program_identity()})


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
