"""The line that tells a person how a model's weights are held, and how much of them a step reads. Owns its words."""

from __future__ import annotations

from typing import Final

from kvscope_engine.model.joined.fuse import Fused
from kvscope_engine.model.loading.device import dtype_name
from kvscope_engine.model.loading.loader import LoadedModel
from kvscope_engine.model.loading.quantization import FILED
from kvscope_engine.model.quantized.filed_weight import filed_format
from kvscope_engine.model.work.step_work import ModelWork

EIGHT_BITS: Final = "8 bits (int8)"
_GB: Final = 1_000_000_000


def weights_line(loaded: LoadedModel, fused: Fused, work: ModelWork | None) -> str:
    """As `weights: the file's own 4 bits (Q4_1), 98 MB read a step`: of one token, on each rank."""
    held = _held(loaded, fused)
    return f"weights: {held}" if work is None else f"weights: {held}, {size(work.weights_read(1, 1))} read a step"


def own_bits(name: str) -> str:
    """Of 4 bits in a file that calls them so."""
    return f"the file's own 4 bits{f' ({name})' if name else ''}"


def size(num_bytes: int) -> str:
    """In the units of memory's makers."""
    if num_bytes >= _GB:
        return f"{num_bytes / _GB:.1f} GB"
    return f"{num_bytes / 1e6:.{0 if num_bytes >= 10_000_000 else 1}f} MB"


def _held(loaded: LoadedModel, fused: Fused) -> str:
    if fused.int4:
        is_own = loaded.quantization == FILED
        return own_bits(filed_format(loaded.module)) if is_own else "4 bits (int4, as asked for)"
    if fused.int8:
        return EIGHT_BITS
    filed = filed_format(loaded.module)
    return f"{dtype_name(loaded.dtype)}{f', widened from the file ({filed})' if filed else ''}"
