"""Hashes of block texts. SGLang computes its own only while KV events are enabled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def mixed(values: Hashes) -> Hashes:
    """Return values each bit of which depends on all bits of one that was given (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def text_sums(tokens: Tokens, start: int, before: int) -> Hashes:
    """Return one number for the text up to each token: a running sum, which is `before` at token `start`."""
    places = np.arange(start + 1, start + 1 + tokens.size, dtype=np.uint64)
    each = mixed(tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + mixed(places))
    sums: Hashes = np.cumsum(each, dtype=np.uint64) + np.uint64(before)
    return sums


def hashes_of(sums: Hashes) -> Hashes:
    """Return the hashes of pages, never 0, by the sums at their ends."""
    return mixed(sums) | np.uint64(1)


def tokens_of(host: Any, start: int, end: int) -> Tokens:
    """Return tokens `start` to `end` of the prompt and answer of one of SGLang's requests."""
    prompt, outputs = host.origin_input_ids, host.output_ids
    length = len(prompt)
    parts = [prompt[start:end], outputs[max(0, start - length) : max(0, end - length)]]
    return np.concatenate([np.array(part, np.int64) for part in parts])
