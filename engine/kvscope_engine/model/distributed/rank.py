"""The number of a rank among all ranks, and which heads and rows belong to it. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count`; rank 0 schedules and samples."""

    index: int = 0
    count: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether nothing is shared out."""
        return self.count == 1

    def part(self, size: int) -> slice:
        """Its share of `size` rows, which the number of ranks divides."""
        width = size // self.count
        return slice(self.index * width, (self.index + 1) * width)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """Its KV heads: a share of them, or, where there are fewer than ranks, the one that its query heads read."""
        first = self.index * num_kv_heads // self.count
        return slice(first, first + max(1, num_kv_heads // self.count))


ALONE: Final = Rank()


def divides(count: int, num_query_heads: int, num_kv_heads: int, intermediate: int) -> bool:
    """Whether a layer can be shared out among `count` ranks: evenly, KV heads possibly held by several."""
    kv = num_kv_heads % count == 0 or count % num_kv_heads == 0
    return num_query_heads % count == 0 and kv and intermediate % count == 0
