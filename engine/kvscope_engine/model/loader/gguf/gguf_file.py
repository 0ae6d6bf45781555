"""A model's GGUF file. Owns where it is, and that its header is read once, when somebody asks for it first."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from kvscope_engine.model.loader.download.default_model import default_place
from kvscope_engine.model.loader.download.model_names import ModelName
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, check_gguf


class GgufFile:
    """A file that is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def header(self) -> GgufHeader:
        """Raises BadInput, as `check_gguf` does."""
        return check_gguf(self.path)


def gguf_file(name: ModelName) -> GgufFile | None:
    """That of a model. The default model's may be gone: once converted, it is not needed."""
    path = default_place() if name.kind == "default" else name.path
    return GgufFile(path) if name.kind in ("gguf", "default") and path.is_file() else None
