"""Numbers that differ from step to step do not make Triton compile a kernel again."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_kernels.decode.plan_kernel import _plan_decode_kernel
from kvscope_kernels.kv_write import _kv_write_kernel
from kvscope_kernels.merge_splits import _merge_splits_kernel
from kvscope_kernels.paged_decode_attention import _paged_decode_attention_kernel
from kvscope_kernels.paged_prefill_attention import _paged_prefill_attention_kernel

VARYING: dict[str, tuple[Any, set[str], set[str]]] = {
    "decode": (
        _paged_decode_attention_kernel,
        {"table_stride"},
        {"block_tables", "parts", "sum_offsets"},
    ),
    "prefill": (
        _paged_prefill_attention_kernel,
        {"max_queries", "table_stride"},
        {"block_tables", "query_start", "seq_lens", "parts"},
    ),
    "merge": (
        _merge_splits_kernel,
        {"batch", "shares_stride"},
        {"ranges", "query_start", "parts", "sum_offsets", "shares"},
    ),
    "plan": (
        _plan_decode_kernel,
        {"batch", "sum_capacity", "window", "max_parts", "num_cuts", "num_filling", "min_tokens", "tile_n"},
        {"seq_lens", "parts", "ranges", "sum_offsets"},
    ),
    "write": (_kv_write_kernel, set(), {"slot_mapping"}),
}


@pytest.mark.parametrize("name", VARYING)
def test_changing_numbers_and_alignments_are_not_specialized(name: str) -> None:
    """By default Triton compiles separately for 1, for multiples of 16 and for other numbers."""
    kernel, numbers, pointers = VARYING[name]
    parameters = getattr(kernel, "params", None)
    if parameters is None:
        pytest.skip("without Triton, or in its interpreter, nothing is compiled")
    assert {p.name for p in parameters if p.do_not_specialize} == numbers
    assert {p.name for p in parameters if p.do_not_specialize_on_alignment} == pointers
