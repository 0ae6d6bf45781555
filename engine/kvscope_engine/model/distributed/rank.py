"""Index of a rank among all ranks, and the heads and rows of its shard. Plain numbers without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` tensor-parallel ranks. Rank 0 schedules and samples."""

    index: int = 0
    count: int = 1

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def part(self, size: int) -> slice:
        """Return the rank's slice of `size` rows. The number of ranks must divide `size`."""
        width = size // self.count
        return slice(self.index * width, (self.index + 1) * width)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """Return the slice of the rank's KV heads. With fewer KV heads than ranks, it is the single KV head that the
        rank's query heads read.
        """
        first = self.index * num_kv_heads // self.count
        return slice(first, first + max(1, num_kv_heads // self.count))


ALONE: Final = Rank()


def divides(count: int, num_query_heads: int, num_kv_heads: int, intermediate: int) -> bool:
    """Whether a layer can be sharded evenly among `count` ranks; several ranks may have the same KV head."""
    kv = num_kv_heads % count == 0 or count % num_kv_heads == 0
    return num_query_heads % count == 0 and kv and intermediate % count == 0
