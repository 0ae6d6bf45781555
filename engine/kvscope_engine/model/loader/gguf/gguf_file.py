"""GGUF file of a model: its path, and its header, read once on first use."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from kvscope_engine.model.loader.download.default_model import default_gguf_path
from kvscope_engine.model.loader.download.model_names import ModelName
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, check_gguf


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def header(self) -> GgufHeader:
        return check_gguf(self.path)


def gguf_file(name: ModelName) -> GgufFile | None:
    """Return the GGUF file of a model; None if the model is not a GGUF file.

    Returns None also for the default model if its GGUF file is missing. The file is not needed after its conversion.
    """
    path = default_gguf_path() if name.kind == "default" else name.path
    return GgufFile(path) if name.kind in ("gguf", "default") and path.is_file() else None
