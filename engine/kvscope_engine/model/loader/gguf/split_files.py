"""Finds the parts of a split GGUF model, whose file names are those that `llama-gguf-split` gives. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from kvscope_telemetry.errors import BadInput

_NAME: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model whose first part is `path`, or only `path` if its name is not that of a part.

    Raises BadInput if `path` is a later part, or a part is missing.
    """
    match = _NAME.search(path.name)
    if match is None or match.end() != len(path.name) or not 1 <= int(match[1]) <= int(match[2]):
        return [path]
    stem, count, end = path.name[: match.start()], int(match[2]), path.name[-len(".gguf") :]
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}{end}") for number in range(1, count + 1)]
    if int(match[1]) != 1:
        raise BadInput(
            f"{path} is not accepted: it is part {int(match[1])} of {count}, give the first, {paths[0].name}"
        )
    missing = [part for part in paths if not part.is_file()]
    if missing:
        raise BadInput(
            f"{path} is not accepted: {missing[0].name}, one of its {count} parts, is not in the same folder"
        )
    return paths


def read_gguf(path: Path) -> Any:
    """Return the `gguf` package's reader of the first part, with the tensors of all parts, for transformers' loader.

    The result is adapted to that loader: of lists with one value per layer, only the first value is kept, and gpt-oss's
    rotary scaling, which the loader misreads, is removed.
    """
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader

    first, *others = (GGUFReader(part) for part in parts_of(path))
    for other in others:
        first.tensors.extend(other.tensors)
    count = next((int(field.parts[-1][0]) for key, field in first.fields.items() if key.endswith(".block_count")), 0)
    for key, field in list(first.fields.items()):
        is_list = field.types[:1] == [GGUFValueType.ARRAY] and not key.startswith("tokenizer.")
        if is_list and len(field.data) == count:
            del field.data[1:]
        if key.startswith("gpt-oss.rope.scaling."):
            del first.fields[key]
    return first


@contextmanager
def reading_all_parts() -> Iterator[None]:
    """Return a context in which loaders read all parts of a model when they open the first."""
    import gguf

    with patch.object(gguf, "GGUFReader", lambda path: read_gguf(Path(path))):
        yield
