"""Prefill attention compiled from C: what a token gets hangs on nothing but its request. The rest is in
`test_paged_prefill_attention`, which runs it too."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvscope_kernels.native import prefill
from kvscope_kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"sliding_window": 70, "softcap": 2.0, "sinks": True},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run(batch: Any, first: int, last: int) -> torch.Tensor:
    """Queries first .. last - 1 of a batch of one request, in a step of their own."""
    return prefill.paged_prefill_attention_native(
        batch.query[first:last],
        *(batch.k_cache, batch.v_cache, batch.block_tables),
        *(torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)),
        max_query_len=last - first,
        scale=batch.scale,
        **batch.options,
    )


@DTYPES
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_change_nothing(options: str, dtype: torch.dtype, shape: Any, build: Any) -> None:
    length = 300
    batch = build(shape(seq_lens=[length], query_lens=[length], dtype=dtype, options=OPTIONS[options]))
    at_once = run(batch, 0, length)
    cuts = [0, 1, 64, 67, 200, length]
    chunks = [run(batch, first, last) for first, last in pairwise(cuts)]
    assert torch.equal(torch.cat(chunks), at_once)


@DTYPES
def test_neighbours_change_nothing(dtype: torch.dtype, shape: Any, build: Any) -> None:
    lengths = [5, 150, 1, 70]
    batch = build(shape(seq_lens=lengths, query_lens=[5, 90, 1, 70], dtype=dtype))
    together = _together(batch)
    for index in range(len(lengths)):
        rows = slice(*batch.query_start[index : index + 2].tolist())
        alone = prefill.paged_prefill_attention_native(
            batch.query[rows],
            *(batch.k_cache, batch.v_cache, batch.block_tables[index : index + 1]),
            *(torch.tensor([0, rows.stop - rows.start], dtype=torch.int32), batch.seq_lens[index : index + 1]),
            max_query_len=90,
            scale=batch.scale,
        )
        assert torch.equal(alone, together[rows])


@DTYPES
def test_threads_change_nothing(dtype: torch.dtype, shape: Any, build: Any, threads: Any) -> None:
    """Of which each takes tiles that are smaller."""
    batch = build(shape(seq_lens=[250, 9], query_lens=[200, 9], dtype=dtype))
    threads(1)
    expected = _together(batch)
    threads(3)
    assert torch.equal(_together(batch), expected)


def _together(batch: Any) -> torch.Tensor:
    arguments = batch.query, batch.k_cache, batch.v_cache, batch.block_tables, batch.query_start, batch.seq_lens
    longest = int(batch.query_start.diff().max())
    return prefill.paged_prefill_attention_native(*arguments, max_query_len=longest, scale=batch.scale, **batch.options)
