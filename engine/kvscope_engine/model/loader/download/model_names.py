"""Parses model names: `default`, a Hugging Face id, a folder, a `.gguf` file, or `dummy:CONFIG.json`.

Checks names and whether paths exist, without opening files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvscope_telemetry.errors import BadInput

ACCEPTED: Final = (
    "`default`, a Hugging Face id (OWNER/NAME), a folder with safetensors, a .gguf file, or dummy:CONFIG.json"
)
DUMMY_PREFIX: Final = "dummy:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")

ModelKind = Literal["default", "hub", "folder", "gguf", "dummy"]


@dataclass(frozen=True, slots=True)
class ModelName:
    """A parsed model name. `path` exists and is set for folders, files and dummies."""

    kind: ModelKind
    text: str
    path: Path = Path()


def parse_model_name(text: str) -> ModelName:
    """Parse a model name. Raises BadInput if it is invalid, or a path that does not exist."""
    if text == "default":
        return ModelName("default", text)
    if text.startswith(DUMMY_PREFIX):
        return ModelName("dummy", text, _config_file(text))
    path = _expanded(text)
    if text.lower().endswith(".gguf"):
        return ModelName("gguf", text, _existing_file(text, path))
    if path.is_dir():
        return ModelName("folder", text, path)
    if path.exists():
        raise BadInput(f"model {text!r} is not accepted: a file must be a .gguf file")
    if _looks_like_path(text):
        raise BadInput(f"model {text!r} not found: no such file or folder")
    if not _HUB_ID.fullmatch(text) or ".." in text or "--" in text:
        raise BadInput(f"model {text!r} is not accepted: {ACCEPTED}")
    return ModelName("hub", text)


def _config_file(text: str) -> Path:
    path = _expanded(text.removeprefix(DUMMY_PREFIX))
    return _existing_file(text, path / "config.json" if path.is_dir() else path)


def _existing_file(text: str, path: Path) -> Path:
    if not path.is_file():
        raise BadInput(f"model {text!r} is not there: no such file {str(path)!r}")
    return path


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadInput(f"model {text!r} is not accepted: {error}") from error


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~", ".")) or text.count("/") > 1 or text.endswith("/")
