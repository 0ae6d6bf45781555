"""Formats an analysis of prompts for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope_engine.analysis.analysis_report import EarlyDifferences, PrefixEntry, PromptAnalysis
from kvscope_engine.text_table import table

_MAX_TEXT: Final = 60


def analysis_text(analysis: PromptAnalysis) -> str:
    parts = [_summary(analysis), _pools(analysis), _block_sizes(analysis)]
    if analysis.prefixes:
        parts.append(_prefixes(analysis.prefixes))
    if analysis.differences is not None:
        parts.append(difference_text(analysis.differences, analysis.unbounded_hit_rate))
    notes = note_lines(analysis)
    return "\n\n".join(parts + (["\n".join(notes)] if notes else []))


def summary_lines(analysis: PromptAnalysis) -> list[str]:
    mean = analysis.num_tokens / analysis.num_prompts
    counted = f"tokenizer of {analysis.tokenizer}, " if analysis.tokenizer else ""
    return [
        f"{_prompts(analysis.num_prompts)} with {analysis.num_tokens:,} tokens (mean {mean:,.0f}, longest"
        f" {analysis.longest_prompt_tokens:,}; {counted}blocks of {analysis.block_size} tokens)",
        f"{percent(analysis.unbounded_hit_rate)} of the tokens are found in the cache if nothing is ever evicted:"
        f" {analysis.num_distinct_blocks:,} different blocks",
    ]


def note_lines(analysis: PromptAnalysis) -> list[str]:
    notes = []
    if analysis.num_prompts_with_images:
        notes.append(
            f"Prompts with images: {analysis.num_prompts_with_images:,}. An image counts as a short text that is equal"
            " for equal images, not as the tokens that a model makes of it."
        )
    if count := analysis.num_prompts_with_functions:
        notes.append(
            f"Definitions and calls of functions are not part of the prompts: {_prompts(count)}"
            f" {'has' if count == 1 else 'have'} some."
        )
    if analysis.num_skipped_lines:
        notes.append(f"Lines and prompts left out: {analysis.num_skipped_lines:,} ({'; '.join(analysis.problems)})")
    if num_too_long := max((pool.num_too_long for pool in analysis.pools), default=0):
        notes.append(f"Prompts longer than the smallest pool: {num_too_long:,}. They count as not found in it.")
    return notes


def difference_text(differences: EarlyDifferences, unbounded_hit_rate: float) -> str:
    differ, are = ("differs", "is") if differences.num_prompts == 1 else ("differ", "are")
    lines = [
        f"{_prompts(differences.num_prompts)} {differ} from the one before at an early token (median"
        f" {differences.median_start_token:,}) and {are} equal again afterwards, so that"
        f" {differences.num_lost_tokens:,} tokens are computed again. If what differs came last, up to"
        f" {percent(differences.hit_rate_without)} of the tokens would be found instead of"
        f" {percent(unbounded_hit_rate)}:"
    ]
    for example in differences.examples:
        before = one_line(example.before[-_MAX_TEXT // 2 :])
        lines.append(
            f"  {differences.record_name} {example.line}:"
            f" …{before}[{one_line(example.earlier) or '–'} → {one_line(example.later) or '–'}]…"
        )
    return "\n".join(lines)


def _prompts(count: int) -> str:
    return f"{count:,} prompt" if count == 1 else f"{count:,} prompts"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def one_line(text: str) -> str:
    line = text.replace("\n", "⏎")
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def _summary(analysis: PromptAnalysis) -> str:
    return "\n".join(summary_lines(analysis))


def _pools(analysis: PromptAnalysis) -> str:
    rows = [
        [
            f"{pool.num_blocks:,}",
            f"{pool.num_blocks * analysis.block_size:,}",
            percent(pool.hit_rate),
            _bar(pool.hit_rate),
        ]
        for pool in analysis.pools
    ]
    rows.append(["unbounded", "", percent(analysis.unbounded_hit_rate), _bar(analysis.unbounded_hit_rate)])
    return table(["pool, blocks", "tokens", "hit rate", ""], rows, left_aligned=(3,))


def _block_sizes(analysis: PromptAnalysis) -> str:
    rows = [[f"{each.block_size:,}", percent(each.hit_rate)] for each in analysis.block_sizes]
    return table(["block size", "hit rate, unbounded"], rows, left_aligned=())


def _prefixes(prefixes: Sequence[PrefixEntry]) -> str:
    rows = [
        [
            f"{entry.num_prompts:,}",
            f"{entry.num_tokens:,}",
            f"{entry.num_saved_tokens:,}",
            "  " * entry.depth + (one_line(entry.text) or f"tokens from {entry.start_token:,}"),
        ]
        for entry in prefixes
    ]
    return "Shared prefixes, below each the ones that continue it\n" + table(
        ["prompts", "tokens", "saved", "begins with"], rows, left_aligned=(3,)
    )


def _bar(share: float) -> str:
    return "█" * round(20 * share)
