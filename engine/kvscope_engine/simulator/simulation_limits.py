"""Sizes of a simulated engine, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.errors import BadInput

MAX_BLOCKS: Final = 1 << 24
DEFAULT_STATE_INTERVAL: Final = 512
"""Tokens between two saved states of recurrent layers, as in the engine, unless options or a recording differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLimits:
    """Sizes of a simulated engine. Raises BadInput for a value out of range."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_prefix_caching: bool = True
    """Whether prefixes are cached under the allocator `paged`; no other allocator shares blocks."""

    def with_num_blocks(self, num_blocks: int) -> SimulatedLimits:
        """Return these limits with `num_blocks` blocks in the pool, at most `MAX_BLOCKS`. Raises BadInput if
        `num_blocks` is less than 1.
        """
        return replace(self, num_blocks=min(num_blocks, MAX_BLOCKS))

    def __post_init__(self) -> None:
        _check_count("num_gpu_blocks_override", self.num_blocks, MAX_BLOCKS)
        _check_count("block_size", self.block_size, 1024)
        _check_count("max_num_seqs", self.max_num_seqs, 1 << 16)
        _check_count("max_num_batched_tokens", self.max_num_batched_tokens, 1 << 31)
        _check_count("max_model_len", self.max_model_len, 1 << 31)


def _check_count(name: str, value: int, high: int) -> None:
    if not 1 <= value <= high:
        raise BadInput(f"{name}={value} is not accepted: must be a whole number from 1 to {high}")
