"""Analyses a request file: reads it once for hashes and token counts, simulates the cache for several pool sizes, and
reads a part of it again for the texts of what is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvscope_engine.analysis.analysis_report import (
    BlockSizeHitRate,
    DifferenceExample,
    EarlyDifferences,
    PoolHitRate,
    PrefixEntry,
    PromptAnalysis,
)
from kvscope_engine.analysis.cache_simulation import simulate_cache
from kvscope_engine.analysis.early_differences import EarlyDifference, early_difference
from kvscope_engine.analysis.prefix_tree import largest_prefixes, shared_prefixes
from kvscope_engine.analysis.prompt_formats import FilePrompt
from kvscope_engine.analysis.prompt_log import Counts, PromptLog
from kvscope_engine.analysis.prompt_tokens import PromptEncoder
from kvscope_engine.analysis.request_file import PromptKey, RequestFile
from kvscope_engine.simulator.workloads.mooncake import TOKENS_PER_HASH
from kvscope_telemetry.errors import BadInput

MAX_BLOCK_SIZE: Final = 1 << 16
_SMALLEST_UNIT: Final = 8
_COMPARED_BLOCK_SIZES: Final = (8, 16, 32, 64, 128, 256)
_NUM_POOLS: Final = 8
_MAX_PREFIXES: Final = 20
_MIN_SAVED: Final = 0.001
"""Share of all tokens that a prefix must save to be shown."""
_MAX_EXAMPLES: Final = 3
_TEXT_TOKENS: Final = 24
"""Number of tokens whose text is shown of a prefix, and before a difference."""

Progress = Callable[[str, float], object]
"""Called with the name of a stage and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """Raises BadInput for a value out of range."""

    block_size: int | None = None
    """Tokens per block; 16, or 512 for a Mooncake trace, if None."""
    pool_blocks: tuple[int, ...] = ()
    """Pool sizes for the curve; chosen from the file if empty."""
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and not 1 <= size <= MAX_BLOCK_SIZE:
            raise BadInput(f"block_size={size} is not accepted: must be from 1 to {MAX_BLOCK_SIZE}")
        if min(self.pool_blocks, default=1) < 1:
            raise BadInput(f"pool_blocks={min(self.pool_blocks)} is not accepted: must be at least 1")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise BadInput(f"requests={self.max_prompts} is not accepted: must be at least 1")


@dataclass(slots=True)
class _Reading:
    """What one reading of the file found."""

    log: PromptLog
    block_size: int
    is_hashed: bool
    num_prompts_with_images: int = 0
    num_prompts_with_functions: int = 0
    differences: list[EarlyDifference | None] = field(default_factory=list)
    """For each prompt, how it differs from the prompt before it."""

    def equal_again_until(self) -> Counts:
        """Return, for each prompt, the position up to which it equals the prompt before except for an early difference,
        in whole units as the known tokens are counted; 0 without such a difference.
        """
        ends = [0 if each is None else each.end + each.num_equal for each in self.differences]
        return np.array(ends, np.int64) // self.log.unit * self.log.unit


def analyze_file(
    path: Path,
    options: AnalysisOptions,
    make_encoder: Callable[[], PromptEncoder],
    tokenizer: str,
    report: Progress = lambda stage, share: None,
) -> PromptAnalysis:
    """Analyse the prompts of a file. `make_encoder` is called if the file has text, `tokenizer` names its model.

    Raises BadInput for a file that cannot be read, or without a prompt.
    """
    file = RequestFile(path)
    encoders: list[PromptEncoder] = []

    def encoder() -> PromptEncoder:
        if not encoders:
            encoders.append(make_encoder())
        return encoders[0]

    reading = _read(file, options, encoder, report)
    num_skipped, problems = file.num_skipped, tuple(file.problems)
    log, size = reading.log, reading.block_size
    num_tokens, known = log.num_tokens, log.known_units() * log.unit
    total = max(1, int(num_tokens.sum()))
    prefixes = largest_prefixes(shared_prefixes(log, size), _MAX_PREFIXES, _MIN_SAVED * total)
    num_distinct = len(np.unique(np.concatenate(list(log.block_hashes(size)))))
    pools = _pool_sizes(options, num_tokens, size, num_distinct)
    lost = np.flatnonzero(reading.equal_again_until() > known).tolist()
    shown = {log.keys[index] for example in lost[:_MAX_EXAMPLES] for index in (example - 1, example)}
    texts = _Texts(file, encoder, {log.keys[prefix.example] for _, prefix in prefixes} | shown)
    return PromptAnalysis(
        file=path.name,
        tokenizer="" if reading.is_hashed else tokenizer,
        num_prompts=len(log),
        num_tokens=int(num_tokens.sum()),
        longest_prompt_tokens=int(num_tokens.max()),
        block_size=size,
        num_distinct_blocks=num_distinct,
        unbounded_hit_rate=_hit_tokens(known, num_tokens, size) / total,
        pools=tuple(
            _pool_hit_rate(log, size, num_blocks, total, report, (index, len(pools)))
            for index, num_blocks in enumerate(pools)
        ),
        block_sizes=tuple(
            BlockSizeHitRate(block_size=other, hit_rate=_hit_tokens(known, num_tokens, other) / total)
            for other in sorted({*_COMPARED_BLOCK_SIZES, size, 2 * size, 4 * size})
            if other % log.unit == 0
        ),
        prefixes=tuple(
            PrefixEntry(
                depth=depth,
                num_prompts=prefix.num_prompts,
                start_token=prefix.start,
                num_tokens=prefix.end - prefix.start,
                num_saved_tokens=prefix.num_saved_tokens,
                text=texts.part(log.keys[prefix.example], prefix.start, min(prefix.end, prefix.start + _TEXT_TOKENS)),
            )
            for depth, prefix in prefixes
        ),
        differences=_differences(reading, known, total, texts, lost, file.record_name),
        num_prompts_with_images=reading.num_prompts_with_images,
        num_prompts_with_functions=reading.num_prompts_with_functions,
        num_skipped_lines=num_skipped,
        problems=problems,
    )


def _read(
    file: RequestFile, options: AnalysisOptions, encoder: Callable[[], PromptEncoder], report: Progress
) -> _Reading:
    reading: _Reading | None = None
    earlier: list[int] | None = None
    for key, prompt in file.prompts(lambda share: report("read", share)):
        if reading is None:
            reading = _new_reading(prompt, options)
        if prompt.is_hashed is not reading.is_hashed:
            file.skip(key[0], "prompts and lines of a Mooncake trace cannot be analysed together")
            continue
        if reading.is_hashed:
            hashes = prompt.hash_ids[: prompt.num_tokens // TOKENS_PER_HASH]
            reading.log.add_hashes(key, prompt.num_tokens, hashes)
            reading.differences.append(None)
        else:
            try:
                token_ids = encoder().token_ids(prompt)
            except BadInput as error:
                file.skip(key[0], str(error))
                continue
            if not token_ids:
                file.skip(key[0], "a prompt without tokens")
                continue
            reading.log.add_tokens(key, token_ids)
            reading.num_prompts_with_images += prompt.num_images > 0
            reading.num_prompts_with_functions += prompt.has_functions
            reading.differences.append(None if earlier is None else early_difference(earlier, token_ids))
            earlier = token_ids
        if options.max_prompts is not None and len(reading.log) >= options.max_prompts:
            break
    if reading is None or not len(reading.log):
        reasons = f" ({'; '.join(file.problems)})" if file.problems else ""
        raise BadInput(f"request file {str(file.path)!r} contains no prompt{reasons}")
    return reading


def _new_reading(prompt: FilePrompt, options: AnalysisOptions) -> _Reading:
    if prompt.is_hashed:
        size = options.block_size or TOKENS_PER_HASH
        if size % TOKENS_PER_HASH:
            raise BadInput(
                f"block_size={size} is not accepted with a Mooncake trace: must be a multiple of {TOKENS_PER_HASH}"
            )
        return _Reading(PromptLog(TOKENS_PER_HASH), size, is_hashed=True)
    size = options.block_size or 16
    return _Reading(PromptLog(size if size % _SMALLEST_UNIT else _SMALLEST_UNIT), size, is_hashed=False)


def _hit_tokens(known: Counts, num_tokens: Counts, block_size: int) -> int:
    """Return the cached tokens that prompts find without evictions. The last token of a prompt is always computed."""
    return int((np.minimum(known, num_tokens - 1) // block_size * block_size).sum())


def _pool_sizes(options: AnalysisOptions, num_tokens: Counts, block_size: int, num_distinct: int) -> list[int]:
    """Return the sizes of the curve: from the longest prompt to a pool that holds all blocks."""
    if options.pool_blocks:
        return sorted(set(options.pool_blocks))
    low = max(1, -(-int(num_tokens.max()) // block_size))
    high = max(low, num_distinct + low)
    return sorted({round(size) for size in np.geomspace(low, high, _NUM_POOLS)})


def _pool_hit_rate(
    log: PromptLog, block_size: int, num_blocks: int, total: int, report: Progress, position: tuple[int, int]
) -> PoolHitRate:
    report("simulate", position[0] / position[1])
    run = simulate_cache(
        zip(log.block_hashes(block_size), log.num_tokens.tolist(), strict=True), num_blocks, block_size
    )
    return PoolHitRate(num_blocks=num_blocks, hit_rate=run.num_hit_tokens / total, num_too_long=run.num_too_long)


def _differences(
    reading: _Reading, known: Counts, total: int, texts: _Texts, lost: list[int], record_name: str
) -> EarlyDifferences | None:
    """Return the early differences of the prompts `lost`: no other prompt shares as much as the prompt before would."""
    if not lost:
        return None
    size, keys, num_tokens = reading.block_size, reading.log.keys, reading.log.num_tokens
    hits = _hit_tokens(known, num_tokens, size)
    hits_without = _hit_tokens(np.maximum(known, reading.equal_again_until()), num_tokens, size)
    found = [(index, each) for index in lost if (each := reading.differences[index]) is not None]
    return EarlyDifferences(
        num_prompts=len(lost),
        median_start_token=int(np.median([each.start for _, each in found])),
        num_lost_tokens=hits_without - hits,
        hit_rate_without=hits_without / total,
        examples=tuple(
            DifferenceExample(
                before=texts.part(keys[index], max(0, each.start - _TEXT_TOKENS), each.start),
                earlier=texts.part(keys[index - 1], each.start, each.earlier_end),
                later=texts.part(keys[index], each.start, each.end),
                line=keys[index][0],
            )
            for index, each in found[:_MAX_EXAMPLES]
        ),
        record_name=record_name,
    )


class _Texts:
    """Texts of a few prompts, which are read from the file again."""

    def __init__(self, file: RequestFile, encoder: Callable[[], PromptEncoder], keys: set[PromptKey]) -> None:
        self._encoder = encoder
        self._token_ids: dict[PromptKey, Sequence[int]] = {}
        for key, prompt in file.prompts() if keys else ():
            if key in keys and not prompt.is_hashed:
                self._token_ids[key] = encoder().token_ids(prompt)
            if key in keys:
                keys = keys - {key}
            if not keys:
                break

    def part(self, key: PromptKey, start: int, end: int) -> str:
        """Return the text of the tokens from `start` to `end`; empty if the prompt has only hashes."""
        token_ids = self._token_ids.get(key)
        return "" if token_ids is None else self._encoder().text(list(token_ids[start:end]))
