"""When blocks were last used: a step reads all blocks of the requests that it runs."""

from __future__ import annotations

import pytest

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.last_use import last_used_step, last_used_steps
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.producer.cache_state import CacheState, KnownRequest


class Engine:
    """Publishes the state of a cache with six blocks to a mirror."""

    def __init__(self) -> None:
        cache = CacheInfo(num_blocks=6, block_size=4)
        hello = Hello(
            epoch=1, time_ns=1, wall_time_ns=1, model=ModelInfo(name="m"), cache=cache, device=DeviceInfo(kind="cpu")
        )
        self.state, self.mirror = CacheState(hello), Mirror()
        self.mirror.apply(coalesce([], snapshot=self.state.snapshot()))

    def start(self, blocks: list[int]) -> KnownRequest:
        request = self.state.add_request("r", num_prompt_tokens=8)
        request.state = RequestState.RUNNING
        request.set_table(blocks)
        self.state.set_blocks(blocks, state=BlockState.ACTIVE, owner=request.number, ref_count=1, last_used_step=1)
        return request

    def step(self, number: int, *written: int) -> None:
        self.state.set_blocks(list(written), last_used_step=number)
        self.mirror.apply(coalesce([self.state.frame(number, number)]))


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.first, engine.second = engine.start([0, 1, 2]), engine.start([0, 3])  # type: ignore[attr-defined]
    engine.step(1)
    return engine


def test_decode_uses_all_blocks_of_its_request(engine: Engine) -> None:
    engine.step(7, 2)
    assert last_used_steps(engine.mirror).tolist() == [7, 7, 7, 1, 0, 0]
    assert [last_used_step(engine.mirror, block, (1,)) for block in range(3)] == [7, 7, 7]
    assert last_used_step(engine.mirror, 3, (2,)) == 1


def test_shared_block_is_used_by_each_of_its_requests(engine: Engine) -> None:
    engine.step(7, 2)
    engine.step(9, 3)
    assert last_used_steps(engine.mirror).tolist() == [9, 7, 7, 9, 0, 0]
    assert last_used_step(engine.mirror, 0, (1, 2)) == 9


def test_blocks_of_a_preempted_request_are_not_used(engine: Engine) -> None:
    engine.first.state = RequestState.PREEMPTED  # type: ignore[attr-defined]
    engine.state.touch(engine.first)  # type: ignore[attr-defined]
    engine.step(7, 2)
    assert last_used_steps(engine.mirror).tolist() == [1, 1, 7, 1, 0, 0]
    assert last_used_step(engine.mirror, 1, (1,)) == 1
