"""One client requests hundreds of completions from a real engine while another requests one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.http.served import Served, answer_on, wait_for

COMPLETIONS = "/v1/completions"
NUM_PROMPTS, NUM_CHOICES = 24, 16


@pytest.fixture
def served(make_small: Callable[..., Any]) -> Iterator[Served]:
    """API for two clients with their own keys, in front of an engine that runs few requests at a time."""

    def build(progress: Any, publish: Any, messages_dropped: Any) -> Any:
        return make_small(publish=publish, max_num_seqs=4, num_gpu_blocks_override=64, max_model_len=200)

    one = Served(build=build, api_key="much,little")
    yield one
    one.close()


@pytest.mark.parametrize("key", ["little", "much"])
def test_single_completion_does_not_wait_for_hundreds(served: Served, key: str) -> None:
    """This also holds if both are from the same client, whose requests are served round-robin."""
    prompts = [[2 + number, 7, 9] for number in range(NUM_PROMPTS)]
    body = {"prompt": prompts, "n": NUM_CHOICES, "max_tokens": 100, "ignore_eos": True}
    served.wait_ready()
    with served.post(COMPLETIONS, body, "Authorization: Bearer much"):
        total = NUM_PROMPTS * NUM_CHOICES
        wait_for(lambda: served.engine.num_unfinished > total - NUM_CHOICES, "all of them in the queue")
        for _ in range(3):
            asked = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
            connection = served.post(COMPLETIONS, asked, f"Authorization: Bearer {key}", "Connection: close")
            status, answer = answer_on(connection)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert served.engine.num_unfinished > total // 2, "the single completion waited for most of the others"
    wait_for(lambda: served.engine.num_unfinished == 0, "an end of what nobody wants")
