"""Division of heads among ranks: every query head once, every KV head at least once, next to its query heads."""

from __future__ import annotations

import pytest

from kvscope_engine.model.distributed.rank import Rank, divides
from kvscope_engine.model.distributed.shard import check_divides
from kvscope_telemetry.errors import BadInput


@pytest.mark.parametrize(("count", "query", "kv"), [(1, 8, 4), (2, 8, 4), (4, 8, 4), (4, 8, 2), (8, 8, 1), (3, 9, 3)])
def test_query_heads_are_on_the_rank_of_their_kv_head(count: int, query: int, kv: int) -> None:
    ranks = [Rank(index, count) for index in range(count)]
    assert [head for rank in ranks for head in range(query)[rank.part(query)]] == list(range(query))
    for rank in ranks:
        wanted = {head // (query // kv) for head in range(query)[rank.part(query)]}
        assert wanted == set(range(kv)[rank.kv_heads(kv)])


@pytest.mark.parametrize("count", [2, 4, 5, 6])
def test_uneven_division_is_refused_with_the_possible_sizes(count: int) -> None:
    assert not divides(count, 9, 3, 1536)
    with pytest.raises(
        BadInput, match=rf"tensor_parallel_size={count} .*9 query heads, 3 KV heads .*; accepted are 1, 3"
    ):
        check_divides(count, 9, 3, 1536, "small")
