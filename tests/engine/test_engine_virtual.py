"""An engine with the allocator `virtual`: the memory it reports, the memory the system reports, and what is refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.kv_cache.virtual_memory import host_pages
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror

Make = Callable[..., Engine]
VIRTUAL = {"allocator": "virtual", "enable_prefix_caching": False, "max_model_len": 128}
BLOCK_BYTES = 1024
"""Bytes of a block in one of the tiny model's two layers: 4 slots, keys and values, 2 heads of 16, float32."""


@pytest.fixture
def run_request() -> Callable[[Engine, int, int], list[int]]:
    """Function that runs one request of the given lengths to its end: `run_request(engine, prompt, new)`."""

    def run(engine: Engine, prompt: int, new: int) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        submit = Submit(request_id="-", prompt_token_ids=tuple(range(3, 3 + prompt)), sampling=sampling)
        (completion,) = engine.generate([submit])
        return completion.token_ids

    return run


def test_virtual_engine_reports_address_space_blocks_and_physical_blocks_separately(make_engine: Make) -> None:
    """A slot of 128 tokens has 32 blocks; 4 of them share a page of 4 KiB in each layer."""
    engine = make_engine(**VIRTUAL, num_gpu_blocks_override=70, max_num_seqs=8)
    cache = engine.hello.cache
    assert (cache.allocator, cache.num_blocks, cache.block_bytes) == ("virtual", 8 * 32, 2 * BLOCK_BYTES)
    assert cache.num_physical_blocks == 70 * BLOCK_BYTES // mmap.PAGESIZE * (mmap.PAGESIZE // BLOCK_BYTES)
    assert make_engine(num_gpu_blocks_override=70).hello.cache.num_physical_blocks == 0


def test_reported_memory_equals_the_resident_memory(make_engine: Make, run_request: Any) -> None:
    """Each 16 tokens take a page in each layer; pages stay after the request and are reused."""
    engine = make_engine(**VIRTUAL, num_gpu_blocks_override=64, max_num_seqs=8)
    assert engine.memory().kv_bytes == 64 * 2 * BLOCK_BYTES
    assert engine.memory().kv_resident_bytes == 0
    first = run_request(engine, 20, 13)  # the last token of 33 is never written: 32
    assert engine.memory().kv_resident_bytes == 2 * 2 * 4096
    assert run_request(engine, 20, 13) == first
    assert engine.memory().kv_resident_bytes == 2 * 2 * 4096
    assert run_request(engine, 20, 14)[:13] == first
    assert engine.memory().kv_resident_bytes == 3 * 2 * 4096
    assert make_engine().memory().kv_resident_bytes == -1


def test_resident_memory_of_a_virtual_engine_never_exceeds_its_limit(make_engine: Make) -> None:
    """Twelve requests of up to 60 tokens in 8 pages a layer: pages are moved between slots."""
    engine = make_engine(**VIRTUAL, num_gpu_blocks_override=32, max_num_seqs=8)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for number in range(12):
        tokens = tuple(range(3, 10 + 2 * number))
        engine.submit(Submit(request_id=str(number), prompt_token_ids=tokens, sampling=sampling))
    most, seen = 0, set()
    while engine.has_unfinished:
        engine.step()
        resident = engine.memory().kv_resident_bytes
        assert resident <= engine.memory().kv_bytes == 8 * 2 * 4096
        most = max(most, resident)
        state = np.frombuffer(engine.snapshot().blocks.state, np.uint8)
        seen |= set(np.flatnonzero(state == BlockState.ACTIVE) // 32)
    assert most == 8 * 2 * 4096
    assert len(seen) > 2, "too few slots were used"
    assert engine.snapshot().counters.preemptions > 0


def test_mirror_knows_from_the_frames_which_blocks_have_memory(make_engine: Make, run_request: Any) -> None:
    messages: list[Any] = []
    engine = make_engine(**VIRTUAL, publish=messages.append)
    mirror = Mirror()
    mirror.apply(coalesce((), snapshot=engine.snapshot()))
    assert set(mirror.ledger.state) == {BlockState.UNMAPPED}
    del messages[:]
    run_request(engine, 20, 3)
    mirror.apply(coalesce([message for message in messages if isinstance(message, Frame)]))
    assert mirror.ledger.equals(engine.components.pool.ledger)
    counts = np.bincount(mirror.ledger.state, minlength=4)
    assert (counts[BlockState.FREE], counts[BlockState.ACTIVE], counts[BlockState.CACHED]) == (8, 0, 0)


def test_prefix_caching_is_refused_with_the_virtual_allocator() -> None:
    with pytest.raises(BadInput, match="allocator='virtual' is not accepted with prefix caching: leave out"):
        EngineConfig(allocator="virtual", enable_prefix_caching=True)
    assert not EngineConfig(allocator="virtual").prefix_caching


def test_pool_smaller_than_a_page_is_refused(make_engine: Make) -> None:
    with pytest.raises(BadInput, match=r"a pool of 3 blocks .* is too small for allocator='virtual': .* 2 pages"):
        make_engine(**VIRTUAL, num_gpu_blocks_override=3)


def test_failed_address_reservation_is_reported_in_one_line(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_pages.mmap, "mmap", refuse)
    with pytest.raises(KvscopeError, match=r"^no address space for the KV cache: 16 slots of 32 blocks are 1 MiB"):
        make_engine(**VIRTUAL)


def test_virtual_memory_is_freed_if_the_engine_start_fails_later(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(host_pages.HostPages, "close", lambda self: closed.append(self))
    monkeypatch.setattr("kvscope_engine.components.ModelRunner", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine(**VIRTUAL)
    assert len(closed) == 1
