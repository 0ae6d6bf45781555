"""Which tokens a block holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvscope_engine.policy.kv_cache.block_contents import block_content

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_block_of_a_running_request_returns_its_tokens_and_start_position(drive: Make, prefix_caching: bool) -> None:
    one = drive(block_size=4, prefix_caching=prefix_caching)
    request = one.submit(range(10, 19), 5)
    one.step()
    contents = [
        block_content(block, one.pool, one.scheduler.requests, one.scheduler.prefix_of) for block in request.block_table
    ]
    assert [content.start for content in contents] == [0, 4, 8]
    assert [content.token_ids for content in contents] == [(10, 11, 12, 13), (14, 15, 16, 17), (18,)]
    assert {content.number for content in contents} == {request.number}


def test_block_of_a_cached_prefix_returns_its_tokens_after_the_request_ended(drive: Make) -> None:
    one = drive(block_size=4)
    one.submit(range(9), 1)
    one.run()
    assert block_content(1, one.pool, one.scheduler.requests, one.scheduler.prefix_of).token_ids == (4, 5, 6, 7)


def test_partly_filled_block_shared_with_an_ended_request_returns_its_tokens(drive: Make) -> None:
    one = drive(block_size=4)
    parent = one.submit(range(6), 5)
    one.step()
    child = one.fork(parent)
    one.scheduler.finish(parent, "stop", one.now_ns)
    content = block_content(child.block_table[1], one.pool, one.scheduler.requests, one.scheduler.prefix_of)
    assert (content.number, content.start, content.token_ids) == (child.number, 4, (4, 5))


@pytest.mark.parametrize("block", [-1, 5, 32, 1 << 40])
def test_free_and_unknown_blocks_have_no_contents(drive: Make, block: int) -> None:
    one = drive()
    assert block_content(block, one.pool, one.scheduler.requests, one.scheduler.prefix_of).token_ids == ()
