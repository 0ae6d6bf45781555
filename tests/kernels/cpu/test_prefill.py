"""Prefill attention in C: a token depends only on its request. `test_paged_prefill_attention` tests the rest."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import QueryRuns
from kvscope_kernels.cpu import prefill
from kvscope_kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"sliding_window": 70, "is_chunked": True},
    "all": {"sliding_window": 70, "softcap": 2.0, "sinks": True},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def set_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run(batch: Any, first: int, last: int) -> torch.Tensor:
    """Return queries first to last - 1 of a batch of one request, computed in their own step."""
    args = batch.args(query=batch.query[first:last], seq_lens=torch.tensor([last], dtype=torch.int32))
    return prefill.paged_prefill_attention_native(args, runs_of_one(last - first))


def runs_of_one(num_queries: int) -> QueryRuns:
    return QueryRuns(torch.tensor([0, num_queries], dtype=torch.int32), num_queries)


@DTYPES
@pytest.mark.parametrize("options", OPTIONS)
def test_cpu_prefill_attention_in_chunks_equals_the_whole_prompt_bit_by_bit(
    options: str, dtype: torch.dtype, shape: Any, build: Any
) -> None:
    length = 300
    batch = build(shape(seq_lens=[length], query_lens=[length], dtype=dtype, options=OPTIONS[options]))
    at_once = run(batch, 0, length)
    cuts = [0, 1, 64, 67, 200, length]
    chunks = [run(batch, first, last) for first, last in pairwise(cuts)]
    assert torch.equal(torch.cat(chunks), at_once)


@DTYPES
def test_cpu_prefill_attention_of_a_request_does_not_depend_on_other_requests(
    dtype: torch.dtype, shape: Any, build: Any
) -> None:
    lengths = [5, 150, 1, 70]
    batch = build(shape(seq_lens=lengths, query_lens=[5, 90, 1, 70], dtype=dtype))
    together = _compute_batch(batch)
    for index in range(len(lengths)):
        rows = slice(*batch.query_start[index : index + 2].tolist())
        request = slice(index, index + 1)
        args = batch.args(
            query=batch.query[rows], block_tables=batch.block_tables[request], seq_lens=batch.seq_lens[request]
        )
        alone = prefill.paged_prefill_attention_native(args, runs_of_one(rows.stop - rows.start)._replace(max_len=90))
        assert torch.equal(alone, together[rows])


@DTYPES
def test_cpu_prefill_attention_does_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, shape: Any, build: Any, set_threads: Any
) -> None:
    """With several threads each takes smaller tiles."""
    batch = build(shape(seq_lens=[250, 9], query_lens=[200, 9], dtype=dtype))
    set_threads(1)
    expected = _compute_batch(batch)
    set_threads(3)
    assert torch.equal(_compute_batch(batch), expected)


def _compute_batch(batch: Any) -> torch.Tensor:
    return prefill.paged_prefill_attention_native(batch.args(), batch.runs)
