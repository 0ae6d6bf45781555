"""Steps cut into tiles of fixed sizes: every token once, in order, with its request's data."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvscope_engine.model.batch_invariance.fixed_tiles import split_into_tiles
from kvscope_engine.model.input_batch.step_inputs import StepInputs


def step_of(lengths: list[tuple[int, int]]) -> StepInputs:
    """Return a step of requests given as (cached tokens, new tokens); token ids and slots count from 1."""
    ends = np.cumsum([count for _, count in lengths])
    ids = np.arange(1, 1 + ends[-1])
    return StepInputs(
        input_ids=ids,
        positions=np.concatenate([np.arange(before, before + count) for before, count in lengths]),
        slot_mapping=ids[None],
        block_tables=np.arange(len(lengths), dtype=np.int32)[None, :, None],
        seq_lens=np.array([before + count for before, count in lengths], np.int32),
        query_start=np.array([0, *ends], np.int32),
        num_single_token=0,
        sample_rows=ends - 1,
    )


@pytest.mark.parametrize("sizes", [(8,), (1, 4, 16), (16, 64)])
def test_every_token_of_a_step_is_in_one_fixed_size_tile_with_its_request(sizes: tuple[int, ...]) -> None:
    rng = random.Random(2)
    for _ in range(50):
        lengths = [(rng.choice((0, 1, 30)), rng.choice((1, 1, 2, 9, 33, 70))) for _ in range(rng.randrange(1, 9))]
        step, seen, sampled = step_of(lengths), list[tuple[int, int, int]](), list[int]()
        for tile in split_into_tiles(step, sizes):
            count = int(tile.query_start[-1])
            assert len(tile.input_ids) in sizes
            assert tile.slot_mapping[0, count:].tolist() == [-1] * (len(tile.input_ids) - count), "they write nowhere"
            sampled += tile.input_ids[tile.sample_rows].tolist()
            for row, request in enumerate(tile.block_tables[0, :, 0].tolist()):
                rows = range(tile.query_start[row], tile.query_start[row + 1])
                assert rows, "a tile has no request without tokens"
                assert tile.positions[rows[-1]] == tile.seq_lens[row] - 1
                seen += [(request, int(tile.positions[at]), int(tile.input_ids[at])) for at in rows]
        owners = np.repeat(np.arange(len(lengths)), [count for _, count in lengths])
        assert seen == list(zip(owners.tolist(), step.positions.tolist(), step.input_ids.tolist(), strict=True))
        assert sampled == step.input_ids[step.sample_rows].tolist()


def test_fixed_tile_exceeds_the_remaining_tokens_by_at_most_the_spare_rows() -> None:
    def sizes_for(num_tokens: int, spare_rows: int) -> list[int]:
        tiles = split_into_tiles(step_of([(0, num_tokens)]), (1, 4, 8, 16, 64), spare_rows)
        return [len(tile.input_ids) for tile in tiles]

    assert [sizes_for(count, 4) for count in (1, 3, 5, 9, 40, 63, 70)] == [
        *([1], [4], [8], [8, 1], [16, 16, 8], [64], [64, 8])
    ]
    assert [sizes_for(count, 28) for count in (9, 20, 40)] == [[16], [16, 4], [64]], (
        "larger tiles are used if spare rows are cheap"
    )
