"""Decode plans in Triton's interpreter: every token is in one part, in order and within bounds; layers share a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.decode.bounds import PartBounds, part_bounds
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.decode.plan_kernel import FIRST, ONLY, TILE_B, plan_decode
from kvscope_kernels.launch import UNBOUNDED
from kvscope_kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_torch

pytestmark = pytest.mark.interpreter
TILE_N = 16
POISON = -77


class Planned:
    """The output of the kernel as lists."""

    def __init__(self, interpret: Any, lengths: list[int], bounds: PartBounds, window: int = UNBOUNDED) -> None:
        self.lengths, self.bounds, self.window = lengths, bounds, window
        parts = torch.full((bounds.num_parts + 3, 4), POISON, dtype=torch.int32)
        ranges = torch.full((len(lengths), 2), POISON, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        interpret(plan_decode, seq_lens, parts, ranges, bounds, window=window, tile_n=TILE_N)
        self.beyond = parts[bounds.num_parts :]
        self.parts: list[list[int]] = parts[: bounds.num_parts].tolist()
        self.ranges: list[list[int]] = ranges.tolist()

    def check(self) -> None:
        """Check that the parts of each request cover its visible tokens in order, and that the rest is marked."""
        at = 0
        for request, (length, (first, count)) in enumerate(zip(self.lengths, self.ranges, strict=True)):
            assert (first, count >= 1) == (at, True)
            mine = self.parts[first : first + count]
            assert {part[0] for part in mine} == {request}
            begins, ends = [part[1] for part in mine], [part[2] for part in mine]
            assert begins == [max(length - self.window, 0), *ends[:-1]]
            assert ends[-1] == length
            assert all(end > begin for begin, end in zip(begins, ends, strict=True)) or length == 0
            assert all((end - begin) % TILE_N == 0 for begin, end in zip(begins[:-1], ends[:-1], strict=True))
            assert [part[3] for part in mine] == [FIRST * (i == 0) + ONLY * (count == 1) for i in range(count)]
            at += count
        assert all(part[0] == -1 for part in self.parts[at:])
        assert self.beyond.eq(POISON).all(), "nothing is written past the buffer's end"

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.ranges]


def test_decode_plan_is_correct_for_every_length_up_to_three_tiles(interpret: Any) -> None:
    """Parts have at least one tile, in one batch with the maximum number of splits."""
    lengths = list(range(3 * TILE_N + 2))
    cuts = sum(-(-length // TILE_N) for length in lengths)
    planned = Planned(interpret, lengths, PartBounds(len(lengths) + cuts, cuts, 10**6, TILE_N))
    planned.check()
    assert planned.counts == [max(1, -(-length // TILE_N)) for length in lengths]


@pytest.mark.parametrize("num_cuts", [0, 1, 2, 7, 64])
def test_number_of_splits_is_within_the_limit(interpret: Any, num_cuts: int) -> None:
    lengths = [5000, 0, 33, 1, 640, 100, 32, 31]
    planned = Planned(interpret, lengths, PartBounds(len(lengths) + num_cuts, num_cuts, 10**6, TILE_N))
    planned.check()
    assert sum(planned.counts) <= len(lengths) + num_cuts
    assert max(planned.counts) == planned.counts[0] >= min(num_cuts, 2) // 2 + 1


def test_decode_plan_is_correct_for_the_longest_possible_requests(interpret: Any) -> None:
    """The lengths are at the limit of 32 bits, and their sum is above it."""
    lengths = [2**31 - 2**12] * 2 + [0, 1]
    bounds = part_bounds(len(lengths), max(lengths), 8, TILE_N, 132)
    planned = Planned(interpret, lengths, bounds)
    planned.check()
    assert 100 < sum(planned.counts) <= bounds.num_parts


@pytest.mark.parametrize("window", [1, TILE_N, 40, 200])
def test_decode_plan_splits_only_tokens_within_the_sliding_window(interpret: Any, window: int) -> None:
    lengths = [0, 1, 15, 16, 17, 39, 40, 41, 1000]
    planned = Planned(interpret, lengths, PartBounds(len(lengths) + 60, 60, 10**6, 2 * TILE_N), window)
    planned.check()
    assert planned.counts == [max(1, -(-min(length, window) // (2 * TILE_N))) for length in lengths]


def test_decode_plan_is_correct_with_more_requests_than_one_tile(interpret: Any) -> None:
    lengths = [1] * (TILE_B + 1) + [300, 0]
    bounds = part_bounds(len(lengths), 4000, 8, TILE_N, 132)
    planned = Planned(interpret, lengths, bounds)
    planned.check()
    assert planned.counts[TILE_B:] == [1, 10, 1]


def test_decode_plan_is_correct_with_more_parts_than_one_tile(interpret: Any) -> None:
    planned = Planned(interpret, [TILE_B * TILE_N * 2, 3], PartBounds(900, 898, 10**6, TILE_N))
    planned.check()
    assert planned.counts == [2 * TILE_B, 1]


def on_gpu(op: Any, *arguments: Any, **options: Any) -> None:
    """Run `op` on a GPU like `interpret`, and copy the tensors there and back."""
    there = [each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments]
    op(*there, **options)
    for here, moved in zip(arguments, there, strict=True):
        if isinstance(here, torch.Tensor):
            here.copy_(moved)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [UNBOUNDED, 40])
def test_decode_plans_computed_on_a_gpu_are_correct(window: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    draw = torch.Generator().manual_seed(1)
    for num_requests in (1, 3, 64, 3 * TILE_B + 1):
        for longest in (1, 40, 5000):
            lengths = torch.randint(0, longest + 1, (num_requests,), generator=draw).tolist()
            Planned(on_gpu, lengths, part_bounds(num_requests, longest, 8, TILE_N, 132), window).check()


def decode_twice(args: AttentionArgs, later: torch.Tensor, outs: list[torch.Tensor]) -> int:
    """Run two layers of a step with other lengths in the second, and return the number of plans made. It runs where
    kernels do.
    """
    plans = DecodePlans()
    paged_decode_attention(args._replace(out=outs[0]), plans)
    args.seq_lens.copy_(later)
    paged_decode_attention(args._replace(out=outs[1]), plans)
    return len(plans.plans)


def test_decode_attention_layers_share_the_plan_of_the_first_layer(
    interpret: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """The second layer uses the plan of the first, which shows because the lengths changed in between."""
    batch = build(shape(seq_lens=[70, 300, 0], num_heads=2, num_kv_heads=1))
    args = batch.args(seq_lens=batch.seq_lens.clone(), max_seq_len=300)
    outs = [batch.poisoned_out(), batch.poisoned_out()]
    later = torch.zeros_like(batch.seq_lens)
    assert interpret(decode_twice, args, later, outs) == 1
    assert_close(outs[0], reference(batch))
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)


def test_padding_rows_of_a_graph_give_zeros(
    interpret: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """Padding rows have length 0 and any table; the bound is the longest context, and other rows are unchanged."""
    batch = build(shape(seq_lens=[70, 300, 0, 0], num_heads=2, num_kv_heads=1))
    batch = replace(batch, block_tables=batch.block_tables.clone())
    batch.block_tables[2:] = POISON
    out = batch.poisoned_out()
    interpret(paged_decode_attention, batch.args(max_seq_len=1 << 17, out=out))
    assert_close(out, reference(batch))
    assert out[2:].eq(0).all()


def decode_with_large_offsets(query: torch.Tensor, near: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Read 8-bit blocks (3, 16, 1, 64) at the end of a cache of more than 2^31 elements, most of them untouched."""
    num_blocks = 2**31 // near[0].numel() + 5
    cache = torch.empty(num_blocks, *near.shape[1:], dtype=torch.int8)
    cache[-3:] = near
    scales = torch.full((1, 1, 1), 0.02).expand(num_blocks, 16, 1)
    table = torch.tensor([[num_blocks - 1, num_blocks - 3, num_blocks - 2]], dtype=torch.int32)
    length = torch.tensor([45], dtype=torch.int32)
    args = AttentionArgs(query, cache, cache, table, length, scale, k_scale=scales, v_scale=scales, out=out)
    paged_decode_attention(args)


def test_offsets_above_two_to_the_31_elements_are_correct(interpret: Any, assert_close: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    near = torch.randint(-127, 128, (3, 16, 1, 64), generator=draw, dtype=torch.int8)
    query, out = torch.randn(1, 2, 64, generator=draw), torch.full((1, 2, 64), torch.nan)
    interpret(decode_with_large_offsets, query, near, 0.125, out=out)
    table, length = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([45], dtype=torch.int32)
    scales = torch.full((3, 16, 1), 0.02)
    args = AttentionArgs(query, near, near, table, length, 0.125, k_scale=scales, v_scale=scales)
    assert_close(out, paged_decode_attention_torch(args).double())
