"""Computes hashes of block texts, because SGLang computes hashes only while KV events are enabled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def splitmix64(values: Hashes) -> Hashes:
    """Return `values` with all bits mixed by the finalizer of SplitMix64, so that each output bit depends on
    all input bits.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def text_sums(tokens: Tokens, start: int, initial_sum: int) -> Hashes:
    """Return, for each token, a number that identifies the text up to it: a running sum that starts with
    `initial_sum` at token position `start`.
    """
    positions = np.arange(start + 1, start + 1 + tokens.size, dtype=np.uint64)
    mixed_tokens = splitmix64(tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + splitmix64(positions))
    sums: Hashes = np.cumsum(mixed_tokens, dtype=np.uint64) + np.uint64(initial_sum)
    return sums


def hashes_of(sums: Hashes) -> Hashes:
    """Return the hashes of pages, never 0, from the values of `text_sums` at the pages' ends."""
    return splitmix64(sums) | np.uint64(1)


def tokens_of(host: Any, start: int, end: int) -> Tokens:
    """Return tokens `start` to `end` (exclusive) of the prompt and answer of one of SGLang's requests."""
    prompt, outputs = host.origin_input_ids, host.output_ids
    length = len(prompt)
    parts = [prompt[start:end], outputs[max(0, start - length) : max(0, end - length)]]
    return np.concatenate([np.array(part, np.int64) for part in parts])
