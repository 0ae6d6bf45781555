"""Storages full of random bytes, movers over them, and lanes of a device that run as late as they may."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.device_memory.device_streams import Lane, StreamMark
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_telemetry.engine_config import EngineConfig

BLOCK_SIZE = 4
LAYERS = (LayerShape(2, 8), LayerShape(1, 24))
"""Of two sizes: 1,280 bytes a block in float32, which no sector divides."""


def random_storage(num_blocks: int = 12, seed: int = 0) -> KVStorage:
    """Blocks of random bytes, among them those of NaN."""
    storage = KVStorage(num_blocks, BLOCK_SIZE, LAYERS, torch.float32, torch.device("cpu"))
    draw = torch.Generator().manual_seed(seed)
    for tensor in storage.block_tensors:
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=draw, dtype=torch.uint8))
    return storage


def content(storage: KVStorage, block: int) -> bytes:
    """A block's bytes in the order of its tensors."""
    return b"".join(
        tensor[block].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in storage.block_tensors
    )


def overwrite(storage: KVStorage, block: int, seed: int) -> bytes:
    """New random bytes in a block; what they are."""
    new = np.random.default_rng(seed).integers(0, 256, storage.block_bytes, dtype=np.uint8)
    low = 0
    for tensor in storage.block_tensors:
        raw = tensor[block].view(-1).view(torch.uint8)
        raw.copy_(torch.from_numpy(new[low : low + raw.numel()]))
        low += raw.numel()
    return new.tobytes()


@pytest.fixture
def storage() -> KVStorage:
    return random_storage()


@pytest.fixture
def contents(storage: KVStorage) -> Callable[..., list[bytes]]:
    """contents(blocks): the bytes of each."""
    return lambda blocks: [content(storage, block) for block in blocks]


@pytest.fixture
def scramble(storage: KVStorage) -> Callable[[Sequence[int]], None]:
    """scramble(blocks): other bytes in each, as a step that writes to them would leave."""

    def write(blocks: Sequence[int]) -> None:
        for block in blocks:
            overwrite(storage, block, 1000 + block)

    return write


@dataclass(frozen=True)
class BlockTools:
    """Looking at a block's bytes and changing them, beside the code that is tested."""

    content: Callable[[KVStorage, int], bytes]
    overwrite: Callable[[KVStorage, int, int], bytes]


@pytest.fixture
def tools() -> BlockTools:
    return BlockTools(content, overwrite)


@pytest.fixture
def random_blocks() -> Callable[..., KVStorage]:
    return random_storage


@pytest.fixture
def prefix() -> Callable[[int], Prefix]:
    """The prefix with a number."""
    return numbered_prefix


def numbered_prefix(number: int) -> Prefix:
    """A prefix that no other number has."""
    tokens = np.arange(number, number + BLOCK_SIZE, dtype="<i4").tobytes()
    parent = (number - 1).to_bytes(32, "big") if number else b""
    return Prefix(number.to_bytes(32, "big"), BLOCK_SIZE * number, tokens, parent)


MakeMover = Callable[..., BlockMover]


@pytest.fixture
def make_mover(storage: KVStorage, own_cache: Path) -> Iterator[MakeMover]:
    """make_mover(num_host, num_disk, path, keep): a mover over `storage`, closed at the end."""
    made: list[BlockMover] = []

    def make(num_host: int = 8, num_disk: int = 0, path: Path | None = None, **more: Any) -> BlockMover:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            host_kv_memory_bytes=num_host * storage.block_bytes,
            disk_kv_memory_bytes=num_disk * 4096,
            disk_kv_path=None if path is None else str(path),
            keep_disk_kv=more.get("keep", False),
        )
        mover = make_tier_mover(config, more.get("storage", storage), more.get("fingerprint", "test"))
        assert mover is not None
        made.append(mover)
        return mover

    yield make
    for mover in made:
        mover.close()


@dataclass(eq=False)
class LateMark:
    """Passed when its lane comes to it."""

    passed: bool = False

    def has_passed(self) -> bool:
        return self.passed

    def seconds_since(self, earlier: StreamMark) -> float:
        assert self.passed
        assert earlier.has_passed()
        return 0.001


Step = Callable[[], bool]
"""Does one piece of work of a lane; False when it has to wait."""


@dataclass
class LateStreams:
    """Lanes whose work runs when `advance` or `finish` says so, in each lane's order and behind its waits alone."""

    random: random.Random
    lanes: dict[Lane, deque[Step]] = field(default_factory=lambda: {"compute": deque(), "copy": deque()})

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        self.lanes[lane].append(lambda: work() is None)

    def mark(self, lane: Lane) -> LateMark:
        mark = LateMark()

        def pass_by() -> bool:
            mark.passed = True
            return True

        self.lanes[lane].append(pass_by)
        return mark

    def wait(self, lane: Lane, mark: StreamMark) -> None:
        self.lanes[lane].append(mark.has_passed)

    def finish(self, lane: Lane) -> None:
        """As late as it may: the other lane goes on only as far as this one needs."""
        while self.lanes[lane]:
            if not self._step(lane):
                assert self._step(_other(lane)), "both lanes wait for each other"

    def advance(self, num_steps: int) -> None:
        """Some of what may run, in an order that nobody can rely on."""
        for _ in range(num_steps):
            lane = self.random.choice(("compute", "copy"))
            if self.lanes[lane]:
                self._step(lane)

    def _step(self, lane: Lane) -> bool:
        work = self.lanes[lane]
        done = bool(work) and work[0]()
        if done:
            work.popleft()
        return done


def _other(lane: Lane) -> Lane:
    return "copy" if lane == "compute" else "compute"


@pytest.fixture
def late_streams() -> type[LateStreams]:
    return LateStreams


@pytest.fixture
def open_fds() -> Callable[[], int]:
    """How many files this process has open."""
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
