"""Block hashes of all prompts: 8 bytes for each block, so that also large files fit in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvscope_engine.analysis.request_file import PromptKey
from kvscope_engine.policy.prefixes.prefix_index import PrefixIndex, published_hash

Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


class PromptLog:
    """Prompts in the order of the file. `unit` is the number of tokens for which there is one hash.

    A hash stands for all tokens up to the end of its unit, so that those of larger blocks are every second one, and
    so on.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.keys: list[PromptKey] = []
        self._index = PrefixIndex(unit, salt=b"")
        self._hashes = array("Q")
        self._ends = array("q")
        self._num_tokens = array("q")

    def __len__(self) -> int:
        return len(self.keys)

    def add_tokens(self, key: PromptKey, token_ids: Sequence[int]) -> None:
        digests: list[bytes] = []
        self._index.extend(digests, token_ids)
        self.add_hashes(key, len(token_ids), [published_hash(digest) for digest in digests])

    def add_hashes(self, key: PromptKey, num_tokens: int, hashes: Sequence[int]) -> None:
        """Add a prompt with the hashes of its whole units."""
        self.keys.append(key)
        self._hashes.extend(hashes)
        self._ends.append(len(self._hashes))
        self._num_tokens.append(num_tokens)

    @property
    def num_tokens(self) -> Counts:
        """Number of tokens of each prompt."""
        return np.array(self._num_tokens, np.int64)

    def block_hashes(self, block_size: int) -> Iterator[Hashes]:
        """Yield the hashes of the full blocks of each prompt. `block_size` must be a multiple of `unit`."""
        hashes, stride, start = np.frombuffer(self._hashes, np.uint64), block_size // self.unit, 0
        for end in self._ends:
            yield hashes[start + stride - 1 : end : stride]
            start = end

    def known_units(self) -> Counts:
        """Return, for each prompt, how many of its leading units an earlier prompt begins with too."""
        hashes = np.frombuffer(self._hashes, np.uint64)
        if not hashes.size:
            return np.zeros(len(self), np.int64)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        ends = np.array(self._ends, np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        is_known = first[inverse] < np.repeat(starts, ends - starts)
        # A known unit follows known units only, so that counting them gives the length of the prefix.
        sums = np.concatenate(([0], np.cumsum(is_known)))
        counts: Counts = sums[ends] - sums[starts]
        return counts
