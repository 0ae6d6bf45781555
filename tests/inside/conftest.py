"""Fixtures of tests of agents in other engines: a small engine that is not kvscope's, and an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.watching import FrameByFrame

from kvscope_inside import CacheState, Publisher
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, KVGroup, ModelInfo


def hello_of(num_blocks: int = 32, *, num_groups: int = 1, num_reserved: int = 0) -> Hello:
    groups = tuple(KVGroup(kind="full" if not n else "window", window=16 * n) for n in range(num_groups))
    return Hello(
        epoch=7,
        time_ns=1,
        wall_time_ns=2,
        model=ModelInfo(name="theirs"),
        cache=CacheInfo(
            num_blocks=num_blocks,
            block_size=4,
            has_parents=True,
            groups=groups if num_groups > 1 else (),
            num_reserved_blocks=num_reserved,
        ),
        device=DeviceInfo(kind="cpu"),
        capabilities=Capabilities(engine="vllm", completions=False, groups=num_groups > 1),
    )


@pytest.fixture
def publish_state(tmp_path: Path) -> Iterator[Callable[..., tuple[Publisher, FrameByFrame]]]:
    """Function that publishes a state and returns the publisher and an observer: `publish_state(state, …)`."""
    opened: list[Publisher | FrameByFrame] = []

    def start(state: CacheState, **options: object) -> tuple[Publisher, FrameByFrame]:
        endpoint = f"ipc://{tmp_path}/e{len(opened)}"
        publisher = Publisher(endpoint, state, **options)  # type: ignore[arg-type]
        watcher = FrameByFrame(endpoint)
        opened.extend((publisher, watcher))
        return publisher, watcher

    yield start
    for each in reversed(opened):
        each.close()
