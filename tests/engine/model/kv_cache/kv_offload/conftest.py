"""Fixtures: storages with random bytes, movers over them, and device streams that run as late as allowed."""

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
"""Layers of two sizes: 1,280 bytes per block in float32, not a multiple of a sector."""


def random_storage(num_blocks: int = 12, seed: int = 0) -> KVStorage:
    """Return a storage with random bytes, including NaNs."""
    storage = KVStorage(num_blocks, BLOCK_SIZE, LAYERS, torch.float32, torch.device("cpu"))
    draw = torch.Generator().manual_seed(seed)
    for tensor in storage.block_tensors:
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=draw, dtype=torch.uint8))
    return storage


def content(storage: KVStorage, block: int) -> bytes:
    """Return a block's bytes in the order of its tensors."""
    return b"".join(
        tensor[block].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in storage.block_tensors
    )


def overwrite(storage: KVStorage, block: int, seed: int) -> bytes:
    """Write new random bytes to a block and return them."""
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
    """Function that returns the bytes of each block: `contents(blocks)`."""
    return lambda blocks: [content(storage, block) for block in blocks]


@pytest.fixture
def scramble(storage: KVStorage) -> Callable[[Sequence[int]], None]:
    """Function that overwrites blocks with other bytes, as a step would: `scramble(blocks)`."""

    def write(blocks: Sequence[int]) -> None:
        for block in blocks:
            overwrite(storage, block, 1000 + block)

    return write


@dataclass(frozen=True)
class BlockTools:
    """Reads and changes a block's bytes independently of the tested code."""

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
    """Function that returns the prefix with a number."""
    return numbered_prefix


def numbered_prefix(number: int) -> Prefix:
    """Return a prefix that is distinct for each number."""
    tokens = np.arange(number, number + BLOCK_SIZE, dtype="<i4").tobytes()
    parent = (number - 1).to_bytes(32, "big") if number else b""
    return Prefix(number.to_bytes(32, "big"), BLOCK_SIZE * number, tokens, parent)


MakeMover = Callable[..., BlockMover]


@pytest.fixture
def make_mover(storage: KVStorage, own_cache: Path) -> Iterator[MakeMover]:
    """Function that makes a mover over `storage`, closed after the test: `make_mover(num_host, num_disk, path,
    keep)`.
    """
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
    """Mark that is passed when its stream reaches it."""

    passed: bool = False

    def has_passed(self) -> bool:
        return self.passed

    def seconds_since(self, earlier: StreamMark) -> float:
        assert self.passed
        assert earlier.has_passed()
        return 0.001


Step = Callable[[], bool]
"""Runs one piece of work of a stream. Returns False if it has to wait."""


@dataclass
class LateStreams:
    """Streams whose work runs when `advance` or `finish` is called, in order within a stream and only after
    its waits.
    """

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
        """Finish as late as allowed: the other stream advances only as far as this one needs."""
        while self.lanes[lane]:
            if not self._step(lane):
                assert self._step(_other(lane)), "both lanes wait for each other"

    def advance(self, num_steps: int) -> None:
        """Run some of the work that may run, in random order."""
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
    """Function that returns the number of open files of this process."""
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
