"""Builds the status line that describes how a model's weights are stored, and how many bytes of them a step reads."""

from __future__ import annotations

from typing import Final

from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.quantization_choice import AS_STORED, AS_STORED_A8
from kvscope_engine.model.platforms.device import dtype_name
from kvscope_engine.model.quantization.stored_weight import stored_format
from kvscope_engine.model.verification.fuse import FusedCounts
from kvscope_engine.roofline.step_costs import ModelWork

_GB: Final = 1_000_000_000


def weights_line(loaded: LoadedModel, fused: FusedCounts, work: ModelWork | None) -> str:
    """Return a line such as `weights: the file's own 4 bits (Q4_1), 98 MB read a step`, for a step of one token on each
    rank.
    """
    text = _weights_text(loaded, fused)
    return (
        f"weights: {text}" if work is None else f"weights: {text}, {format_size(work.weights_read(1, 1))} read a step"
    )


def file_bits_text(bits: int, name: str) -> str:
    """Describe weights that are stored in their file's format. `name` is the format's name in the file, or ""
    if unknown.
    """
    return f"the file's own {bits} bits{f' ({name})' if name else ''}"


def format_size(num_bytes: int) -> str:
    """Format a size in decimal MB or GB."""
    if num_bytes >= _GB:
        return f"{num_bytes / _GB:.1f} GB"
    return f"{num_bytes / 1e6:.{0 if num_bytes >= 10_000_000 else 1}f} MB"


def _weights_text(loaded: LoadedModel, fused: FusedCounts) -> str:
    file_format, activations = stored_format(loaded.module), ""
    if loaded.device.type == "cpu" and loaded.quantization not in (AS_STORED, "none"):
        activations = ", 8-bit activations"
    if fused.int4 or fused.int8:
        bits = 4 if fused.int4 else 8
        if loaded.quantization == "fp8":
            return "8 bits (fp8, as asked for), 8-bit activations"
        is_own = loaded.quantization in (AS_STORED, AS_STORED_A8)
        return (file_bits_text(bits, file_format) if is_own else f"{bits} bits (int{bits}, as asked for)") + activations
    if fused.packed_experts:
        return f"{dtype_name(loaded.dtype)}, experts in {file_bits_text(4, file_format)}"
    return f"{dtype_name(loaded.dtype)}{f', widened from the file ({file_format})' if file_format else ''}"
