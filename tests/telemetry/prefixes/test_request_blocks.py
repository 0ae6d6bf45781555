"""The blocks that belong to a request, while it runs and after it ended."""

from __future__ import annotations

import pytest

from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.request_blocks import blocks_of_request


@pytest.fixture
def mirror():
    made = Mirror()
    made.ledger = Ledger(16)
    return made


def cache(mirror, rows, owner, hashes, after=0, state=BlockState.CACHED):
    """Cache chained blocks written by `owner`, following the block with hash `after`."""
    for row, block_hash in zip(rows, hashes, strict=True):
        ledger = mirror.ledger
        ledger.state[row], ledger.owner[row] = state, owner
        ledger.hash[row], ledger.parent[row] = block_hash, after
        after = block_hash


def test_ended_request_has_its_own_and_all_reused_blocks_before_them(mirror):
    cache(mirror, [3, 1], 4, [11, 12])
    cache(mirror, [8], 6, [13], after=12)
    cache(mirror, [5, 9], 7, [14, 15], after=13)
    cache(mirror, [2], 6, [99], after=12)  # another continuation
    assert sorted(blocks_of_request(mirror, 7)) == [1, 3, 5, 8, 9]
    assert sorted(blocks_of_request(mirror, 6)) == [1, 2, 3, 8]
    assert sorted(blocks_of_request(mirror, 4)) == [1, 3]


def test_request_that_wrote_no_full_block_has_those_that_it_reused(mirror):
    cache(mirror, [3, 1, 2], 4, [11, 12, 13])
    mirror.last_hashes[7] = 12
    assert sorted(blocks_of_request(mirror, 7)) == [1, 3]


def test_blocks_of_an_ended_request_are_listed_once_while_another_request_holds_its_last(mirror):
    cache(mirror, [3], 4, [11])
    cache(mirror, [1], 7, [12], after=11)
    cache(mirror, [2], 7, [13], after=12, state=BlockState.ACTIVE)
    mirror.last_hashes[7] = 13
    assert sorted(blocks_of_request(mirror, 7)) == [1, 2, 3]


def test_reused_blocks_count_while_another_request_holds_them(mirror):
    cache(mirror, [3, 1], 4, [11, 12], state=BlockState.ACTIVE)
    cache(mirror, [5], 7, [13], after=12)
    assert sorted(blocks_of_request(mirror, 7)) == [1, 3, 5]


def test_blocks_of_an_ended_request_are_found_even_if_its_first_block_was_evicted(mirror):
    cache(mirror, [1], 4, [12], after=11)
    cache(mirror, [5], 7, [13], after=12)
    assert sorted(blocks_of_request(mirror, 7)) == [1, 5]


def test_blocks_of_a_request_are_found_even_if_their_parents_form_a_cycle(mirror):
    cache(mirror, [1, 2], 4, [11, 12], after=12)
    cache(mirror, [5], 7, [13], after=12)
    assert sorted(blocks_of_request(mirror, 7)) == [1, 2, 5]


def test_request_that_left_nothing_has_no_blocks(mirror):
    cache(mirror, [1], 4, [11])
    assert blocks_of_request(mirror, 7).size == 0
