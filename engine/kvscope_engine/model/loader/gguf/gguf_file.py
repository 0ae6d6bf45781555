"""GGUF file of a model. Owns its path, and reads its header once, on first use."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from kvscope_engine.model.loader.download.default_model import default_place
from kvscope_engine.model.loader.download.model_names import ModelName
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, check_gguf


class GgufFile:
    """An existing GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def header(self) -> GgufHeader:
        """Header of the file. Raises BadInput like `check_gguf`."""
        return check_gguf(self.path)


def gguf_file(name: ModelName) -> GgufFile | None:
    """Return the GGUF file of a model, or None. The default model's may be missing: it is not needed once converted."""
    path = default_place() if name.kind == "default" else name.path
    return GgufFile(path) if name.kind in ("gguf", "default") and path.is_file() else None
