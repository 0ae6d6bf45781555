"""Which tensors of a GGUF file became weights: transformers' loader drops those it has no place for.

Owns the watching of that loader. Knows tensors by name alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from kvscope_engine.model.gguf.header import GgufHeader
from kvscope_engine.model.gguf.rope import ROPE_TENSORS
from kvscope_telemetry.errors import BadInput

_HARMLESS: Final = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Rotations computed ahead, which old writers left in; no program reads them."""


@contextmanager
def watched_tensors() -> Iterator[set[str]]:
    """The names that the loader found a place for inside, as far as it came."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader

    used: set[str] = set()
    with patch.object(gguf_loader, "TENSOR_PROCESSORS", _Watched(gguf_loader.TENSOR_PROCESSORS, used)):
        yield used


def check_used(header: GgufHeader, used: set[str]) -> None:
    """Raise BadInput, naming one, when a tensor of the file is in no weight of the model."""
    left = sorted(header.shapes.keys() - used - set(ROPE_TENSORS))
    left = [name for name in left if not _HARMLESS.fullmatch(name)]
    if left:
        raise BadInput(
            f"it is not accepted: {len(left)} of its tensors, {left[0]} for one, have no place in"
            f" architecture {header.architecture!r} here; without them its answers would be others"
        )


class _Watched:
    """transformers' processors by architecture, each told to say what it takes."""

    def __init__(self, processors: dict[str, Any], used: set[str]) -> None:
        self._processors, self._used = processors, used

    def get(self, architecture: str, default: Any) -> Callable[..., Any]:
        kind = self._processors.get(architecture, default)
        return lambda config: _watch(kind(config=config), self._used)


def _watch(processor: Any, used: set[str]) -> Any:
    process = processor.process

    def watched(weights: Any, name: str, **options: Any) -> Any:
        result = process(weights=weights, name=name, **options)
        if result.name is None or result.name in options["tensor_key_mapping"]:  # None: it has put it away itself
            used.add(name)
        return result

    processor.process = watched
    return processor
