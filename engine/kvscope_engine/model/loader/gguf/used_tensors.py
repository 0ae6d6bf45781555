"""Checks that all tensors of a GGUF file were used: transformers' loader drops those that it does not know.

Owns the instrumentation of that loader, which also gets the processors that it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader
from kvscope_engine.model.loader.gguf.rope import ROPE_TENSORS
from kvscope_engine.model.loader.gguf.tensor_processors import is_unused, processors
from kvscope_telemetry.errors import BadInput

_IGNORED_TENSORS: Final = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""GGUF tensors that are ignored: precomputed rotary embeddings in files of old converters, which no program reads."""


@contextmanager
def watched_tensors() -> Iterator[set[str]]:
    """Return a context that yields a set, to which transformers' GGUF loader adds the name of each tensor that
    it uses.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf_loader

    used: set[str] = set()
    all_processors = gguf_loader.TENSOR_PROCESSORS | processors()
    # `patch` replaces the loader's table, which has no interface for this, and restores it even after an error.
    with patch.object(gguf_loader, "TENSOR_PROCESSORS", _WatchedProcessors(all_processors, used)):
        yield used


def check_used(header: GgufHeader, used: set[str]) -> None:
    """Raise BadInput if the file has tensors for which the model has no weight. The message names one such tensor."""
    unused = sorted(header.shapes.keys() - used - set(ROPE_TENSORS))
    unused = [name for name in unused if not _IGNORED_TENSORS.fullmatch(name) and not is_unused(header, name)]
    if unused:
        raise BadInput(
            f"it is not accepted: {len(unused)} of its tensors, {unused[0]} for one, have no place in"
            f" architecture {header.architecture!r} here; without them its answers would be others"
        )


class _WatchedProcessors:
    """transformers' processors by architecture, instrumented to record the tensors that they use."""

    def __init__(self, processors: dict[str, Any], used: set[str]) -> None:
        self._processors, self._used = processors, used

    def get(self, architecture: str, default: Any) -> Callable[..., Any]:
        processor_class = self._processors.get(architecture, default)
        return lambda config: _watch_processor(processor_class(config=config), self._used)


def _watch_processor(processor: Any, used: set[str]) -> Any:
    process = processor.process

    def watched(weights: Any, name: str, **options: Any) -> Any:
        result = process(weights=weights, name=name, **options)
        if result.name is None or result.name in options["tensor_key_mapping"]:  # None: the processor stored it itself
            used.add(name)
        return result

    processor.process = watched
    return processor
