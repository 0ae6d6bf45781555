"""Blocks that sparse decode selects: which, how many, and that exactly those are attended to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvscope_engine.model.device_memory.read_back import RowReadBack
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores
from kvscope_engine.model.layers.attention.paged_attention import AttentionOptions, DecodeBatch, PagedContext
from kvscope_engine.model.layers.attention.sparse.block_skips import BlockSkips
from kvscope_engine.model.layers.attention.sparse.page_choice import PageChoice, by_head
from kvscope_kernels import ops_for
from kvscope_kernels.attention_scores.block_scores import NEAR
from kvscope_kernels.dispatch import torch_ops

BLOCK_SIZE, HEADS, KV_HEADS, DIM = 4, 6, 2, 16
LENGTHS = [0, 1, 37, 40, 41, 90]
OPS = {"torch": torch_ops, "compiled": lambda: ops_for("cpu")}


class Decodes:
    """A layer's blocks, with NaN where nothing was written, and one decode per length."""

    def __init__(
        self, lengths: list[int], dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
    ) -> None:
        draw = torch.Generator().manual_seed(7)
        cuts = [-(-length // BLOCK_SIZE) for length in lengths]
        shape = LayerShape(KV_HEADS, DIM, bounds_dtype=dtype)
        self.storage = KVStorage(sum(cuts) + 2, BLOCK_SIZE, [shape], kv_dtype or dtype, torch.device("cpu"))
        for tensor in self.storage.block_tensors:
            tensor.fill_(math.nan if tensor.is_floating_point() else 127)
        self.kv = self.storage.layer(0)
        self.tables = torch.full((len(lengths), max(cuts) + 1), -5, dtype=torch.int32)
        free = torch.randperm(self.storage.num_blocks, generator=draw).tolist()
        slots = []
        for row, length in enumerate(lengths):
            for column in range(cuts[row]):
                self.tables[row, column] = free.pop()
            slots += [int(self.tables[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for at in range(length)]
        self.slots = torch.tensor(slots, dtype=torch.int64)
        new = torch.randn(2, len(slots), KV_HEADS, DIM, generator=draw).to(dtype)
        torch_ops().kv_write(*new, self.kv.k, self.kv.v, self.slots, self.kv.k_scale, self.kv.v_scale)
        assert self.kv.bounds is not None
        torch_ops().block_bounds(self.kv.k, self.kv.bounds, self.slots, self.kv.k_scale)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.query = torch.randn(len(lengths), HEADS, DIM, generator=draw).to(dtype)
        self.lengths = lengths

    def attend(
        self,
        choice: PageChoice | None,
        ops: Any,
        skips: BlockSkips | None = None,
        shares: AttentionScores | None = None,
    ) -> torch.Tensor:
        """Compute decode attention like a step."""
        batch = DecodeBatch((self.tables,), self.seq_lens, max(self.lengths))
        context = PagedContext(
            self.storage,
            ops,
            (self.slots[:0],),
            len(self.lengths),
            batch,
            None,
            choice=choice,
            skips=skips,
            shares=shares,
        )
        return context.attend_written(self.query, self.kv, AttentionOptions(DIM**-0.5))

    def best(self, choice: PageChoice, row: int, head: int) -> list[int]:
        """Return the columns that must be selected: the first, the last, and those with the largest attention
        bounds.
        """
        count = -(-self.lengths[row] // BLOCK_SIZE)
        queries = self.query[row].view(KV_HEADS, -1, DIM)[head]
        bounds = self.kv.bounds
        assert bounds is not None
        low, high = bounds[self.tables[row, :count].long(), :, head, None].unbind(1)
        near, far = torch.maximum(queries * low, queries * high), torch.minimum(queries * low, queries * high)
        scores = ((NEAR * near + (1 - NEAR) * far).sum(-1) * DIM**-0.5).softmax(0).sum(1).tolist()
        ranked = sorted(range(count), key=lambda column: (column not in (0, count - 1), -scores[column]))
        return sorted(ranked[: choice.num_attended(count)])


def rows_of(measured: AttentionScores | BlockSkips, back: RowReadBack) -> Any:
    found = measured.start(back)
    assert found is not None
    return found()


def choice_of(fraction: float, ops: Any, min_blocks: int = 3) -> PageChoice:
    choice = PageChoice(fraction, BLOCK_SIZE, ops)
    choice.min_blocks = min_blocks
    return choice


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("fraction", "lengths"), [(0.25, LENGTHS), (0.5, LENGTHS), (1e-9, LENGTHS), (0.3, [90])])
def test_each_head_attends_to_exactly_its_best_blocks(name: str, fraction: float, lengths: list[int]) -> None:
    """The result equals full attention over those blocks alone."""
    ops, decodes = OPS[name](), Decodes(lengths)
    choice = choice_of(fraction, ops)
    chosen = choice.choose(decodes.query, decodes.kv, decodes.tables, decodes.seq_lens, max(lengths), scale=DIM**-0.5)
    assert chosen is not None
    found = decodes.attend(choice, ops)
    keys, values = decodes.kv.k, decodes.kv.v
    for row, length in enumerate(lengths):
        for head in range(KV_HEADS):
            wanted = decodes.best(choice, row, head)
            taken = chosen.columns[row, head].tolist()
            assert taken[: len(wanted)] == wanted
            places = [c * BLOCK_SIZE + i for c in wanted for i in range(BLOCK_SIZE) if c * BLOCK_SIZE + i < length]
            blocks = [(int(decodes.tables[row, at // BLOCK_SIZE]), at % BLOCK_SIZE) for at in places]
            assert int(chosen.seq_lens[row * KV_HEADS + head]) == len(places)
            group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            if not places:
                assert not found[row, group].any()
                continue
            k, v = (torch.stack([cache[b, i, head] for b, i in blocks]) for cache in (keys, values))
            weights = (decodes.query[row, group] @ k.T * DIM**-0.5).softmax(-1)
            assert torch.allclose(found[row, group], weights @ v, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)]
)
def test_selecting_every_block_equals_full_attention(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Through the compact tables, which then contain every block; and without them, bit for bit."""
    ops, decodes = OPS[name](), Decodes(LENGTHS, dtype, kv_dtype)
    full = decodes.attend(None, ops)
    assert torch.equal(decodes.attend(choice_of(1.0, ops), ops), full)
    nearly = choice_of(1.0, ops)
    nearly.num_attended = lambda num_blocks: num_blocks - 1  # type: ignore[method-assign]
    decodes.lengths = [*LENGTHS[:-1], 10 * max(LENGTHS)]  # an upper bound above all lengths
    wide = torch.full((len(LENGTHS), 300), -1, dtype=torch.int32)
    wide[:, : decodes.tables.shape[1]] = decodes.tables
    decodes.tables = wide
    through = decodes.attend(nearly, ops)
    assert torch.allclose(through.float(), full.float(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_short_requests_use_full_attention() -> None:
    ops = torch_ops()
    assert PageChoice(0.1, 16, ops).min_blocks == 16, "256 tokens"
    assert PageChoice(0.1, 1024, ops).min_blocks == 3, "the first, the last and one selected block"
    decodes, choice = Decodes([5, 12]), choice_of(0.1, ops, 3)
    assert choice.choose(decodes.query, decodes.kv, decodes.tables, decodes.seq_lens, 12, scale=1.0) is None


@pytest.mark.parametrize(
    ("fraction", "num_blocks", "expected"),
    [(0.25, 256, 64), (0.25, 257, 65), (0.1, 30, 3), (1.0, 77, 77), (0.07, 100, 7)],
)
def test_selected_fraction_is_rounded_up(fraction: float, num_blocks: int, expected: int) -> None:
    assert choice_of(fraction, torch_ops(), 1).num_attended(num_blocks) == expected


def test_share_of_skipped_blocks_is_averaged_over_heads_and_layers() -> None:
    ops, decodes, skips = torch_ops(), Decodes([40, 9]), BlockSkips()
    choice = choice_of(0.3, ops)
    assert skips.start(RowReadBack(torch.device("cpu"), 0)) is None
    for _ in range(2):
        decodes.attend(choice, ops, skips)
    decodes.attend(choice_of(1.0, ops), ops, skips)
    shares = rows_of(skips, RowReadBack(torch.device("cpu"), 0))
    assert shares is not None
    for head_share, column in zip(shares[0], range(10), strict=False):
        num_heads = sum(column in decodes.best(choice, 0, head) for head in range(KV_HEADS))
        assert head_share == pytest.approx(2 / 3 * (1 - num_heads / KV_HEADS))
    assert shares[0, 0] == shares[0, 9] == 0.0
    assert shares[1, :3].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("is_hnd", [False, True])
def test_kv_rows_by_head_are_views_of_the_cache_memory(is_hnd: bool) -> None:
    storage = torch.randn((5, 2, 3, 4, 8) if is_hnd else (5, 2, 4, 3, 8))
    for cache in storage.unbind(1):
        view = cache.transpose(1, 2) if is_hnd else cache
        rows, step = by_head(view), view.stride(0) // view.stride(2)
        for block in range(5):
            for head in range(3):
                assert torch.equal(rows[block * step + head, :, 0], view[block, :, head])


def test_tokens_read_are_the_selected_blocks_and_all_bounds() -> None:
    choice = choice_of(0.25, torch_ops())
    assert choice.num_tokens_read(12) == 12
    assert choice.num_tokens_read(41) == 2 * BLOCK_SIZE + 1 + 11
    assert choice.num_tokens_read(400) == 25 * BLOCK_SIZE + 100
    storage = Decodes([9], torch.bfloat16, torch.int8).storage
    eight_bits = PageChoice(0.25, BLOCK_SIZE, torch_ops(), storage.bounds_tokens)
    assert eight_bits.num_tokens_read(41 * 64) == 656 // 4 * BLOCK_SIZE + math.ceil(656 * 2 * DIM / (DIM + 4))


@pytest.mark.parametrize("name", OPS)
def test_blocks_skipped_by_all_heads_get_no_attention(name: str) -> None:
    ops, decodes = OPS[name](), Decodes(LENGTHS)
    skips, shares, full = BlockSkips(), AttentionScores(), AttentionScores()
    decodes.attend(choice_of(0.3, ops), ops, skips, shares)
    decodes.attend(None, ops, None, full)
    back = RowReadBack(torch.device("cpu"), 0)
    of_chosen, passed_over, before = (rows_of(each, back) for each in (shares, skips, full))
    of_chosen, before = of_chosen[0], before[0]
    assert of_chosen.sum(1) == pytest.approx([0.0, *[1.0] * (len(LENGTHS) - 1)], abs=1e-5)
    by_all = (passed_over == 1.0) & (before > 0.0)
    assert by_all.any()
    assert not of_chosen[by_all].any()
    assert ((of_chosen > 0.0) == (passed_over < 1.0))[before > 0.0].all()
