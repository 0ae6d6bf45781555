"""Two ranks with async scheduling and lower tiers: the tokens and counts of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine import Engine
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.3,
    "num_hidden_layers": 2,
}
BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * 4 * 16 * 4 * BLOCK_SIZE
"""Bytes of keys and values of 2 layers and 4 heads in float32, over all ranks."""
RECORD_BYTES = 4096
Make = Callable[..., Engine]
Said = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache folder for temporary files of the disk tier."""
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def options(tiny_model: Callable[..., str]) -> dict[str, Any]:
    return {
        "model": tiny_model(**HEADS),
        "dtype": "float32",
        "quantization": "none",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 40,
        "max_num_batched_tokens": 32,
    }


def completions(engine: Engine, num_requests: int = 12) -> Said:
    """Return results of greedy and sampled prompts, pairs of which share a prefix, exceeding the pool."""
    submits = [
        Submit(
            request_id=f"r{number}",
            prompt_token_ids=(*range(number // 2, number // 2 + 24), *range(100 + number, 103 + 2 * number)),
            sampling=SamplingParams(
                max_tokens=12 + 4 * number, temperature=0.8 * (number % 3 == 2), seed=number, top_k=4, ignore_eos=True
            ),
        )
        for number in range(num_requests)
    ]
    return [tuple(one.token_ids) for one in engine.generate(submits)]


def test_async_scheduling_on_two_ranks_gives_the_tokens_of_one(options: dict[str, Any], make_engine: Make) -> None:
    """Tokens not yet known to the host are taken from rank 0's samples on every rank."""
    options["num_gpu_blocks_override"] = 400
    expected = completions(make_engine(**options, async_scheduling=False))
    engine = make_engine(**options, async_scheduling=True, tensor_parallel_size=2)
    assert completions(engine) == expected
    counts = engine.overlaps
    assert counts.overlapped > counts.steps / 2, counts.summary()


@pytest.mark.storm({"is_ahead": False})
@pytest.mark.parametrize("is_ahead", [False, True])
def test_offloaded_blocks_come_back_on_all_ranks(
    is_ahead: bool, options: dict[str, Any], make_engine: Make, tmp_path: Path
) -> None:
    """Sizes and bytes cover all ranks; a record lost on one rank is recomputed."""
    tiers = {"host_kv_memory_bytes": 6 * BLOCK_BYTES, "preemption": "swap", "async_scheduling": is_ahead}
    path = tmp_path / "tier"
    alone = make_engine(**options, **tiers, disk_kv_memory_bytes=200 * RECORD_BYTES)
    expected = completions(alone)
    engine = make_engine(
        **options,
        **tiers,
        disk_kv_memory_bytes=400 * RECORD_BYTES,  # the record of each rank takes at least a sector
        disk_kv_path=str(path),
        tensor_parallel_size=2,
    )
    assert completions(engine) == expected
    stats, before = engine.components.mover.stats, alone.components.mover.stats
    assert stats is not None
    assert before is not None
    cache = engine.hello.cache
    assert (cache.num_host_blocks, cache.num_disk_blocks) == (6, 200)
    assert stats.saved_bytes > 0
    assert stats.disk_written_bytes > 0
    assert stats.saved_bytes % BLOCK_BYTES == 0
    assert stats.host_requested_bytes == before.host_requested_bytes

    engine.reset_prefix_cache()
    mover, ranks = engine.components.mover, engine.components.leader
    assert mover is not None
    assert ranks is not None
    mover.save((0, 1, 2), (0, 1, 2))
    mover.flush()
    assert mover.offload((0, 1, 2), (10, 11, 12), (None, None, None)) == [True] * 3
    assert engine.components.mover.drain()
    assert mover.load_from_disk((11,), (4,)) == [True]
    wipe(next(iter(ranks.processes.children.values())).pid, f"{path}.rank1")
    assert mover.load_from_disk((10, 12), (3, 5)) == [False, False]
    assert completions(engine) == expected
    assert list(tmp_path.glob("tier*")) == []


def wipe(pid: int, path: str) -> None:
    """Overwrite what a process has in a deleted file."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{number}"
        if os.path.lexists(link) and os.readlink(link).startswith(path):
            size = os.stat(link).st_size
            with open(link, "r+b") as file:
                file.write(bytes(size))
            return
    raise AssertionError(f"nobody has {path}")
