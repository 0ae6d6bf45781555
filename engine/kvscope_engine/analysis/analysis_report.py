"""The result of analysing a request file: values, without formatting."""

from __future__ import annotations

import msgspec


class PoolHitRate(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    hit_rate: float
    """Share of all prompt tokens that are found in the cache, 0 to 1."""
    num_too_long: int = 0
    """Number of prompts that do not fit into the pool even alone. Their tokens count as not found."""


class BlockSizeHitRate(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    hit_rate: float
    """Hit rate if nothing is ever evicted."""


class PrefixEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that several prompts share, after the blocks of the entry before with a smaller `depth`."""

    depth: int
    num_prompts: int
    start_token: int
    num_tokens: int
    num_saved_tokens: int
    """Tokens that need not be computed again, if these blocks stay cached."""
    text: str
    """Beginning of the text of these tokens; empty if the file has only hashes."""


class DifferenceExample(msgspec.Struct, frozen=True, kw_only=True):
    before: str
    """Text before the difference."""
    earlier: str
    """Text that differs in the prompt before."""
    later: str
    line: int


class EarlyDifferences(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that differ from the prompt before them, and are equal to it again afterwards."""

    num_prompts: int
    median_start_token: int
    num_lost_tokens: int
    """Tokens that would be found in the cache, in whole blocks, if the difference came after them."""
    hit_rate_without: float
    """Hit rate if nothing is ever evicted and the differences come after the equal tokens."""
    examples: tuple[DifferenceExample, ...]
    record_name: str = "line"
    """What `DifferenceExample.line` counts: `line`, or `record` in a JSON array."""


class PromptAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    tokenizer: str
    """Model whose tokenizer was used; empty if the file has only hashes."""
    num_prompts: int
    num_tokens: int
    longest_prompt_tokens: int
    block_size: int
    num_distinct_blocks: int
    """Number of full blocks with different contents: as many fill the cache if nothing is evicted."""
    unbounded_hit_rate: float
    pools: tuple[PoolHitRate, ...]
    """In order of size."""
    block_sizes: tuple[BlockSizeHitRate, ...]
    prefixes: tuple[PrefixEntry, ...]
    differences: EarlyDifferences | None
    num_prompts_with_images: int
    num_skipped_lines: int
    num_prompts_with_functions: int = 0
    """Prompts whose requests define or call functions, which are not part of the prompts."""
    problems: tuple[str, ...]
    """First lines that were skipped, with the reason."""
