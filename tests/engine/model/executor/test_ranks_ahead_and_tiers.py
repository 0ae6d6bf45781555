"""Two ranks with steps that run ahead and with lower tiers: the tokens of one rank, and its counts."""

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
"""Keys and values of 2 layers and 4 heads in float32, of all ranks together."""
RECORD_BYTES = 4096
Make = Callable[..., Engine]
Said = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temporary files of the disk tier go."""
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


def said(engine: Engine, num_requests: int = 12) -> Said:
    """Prompts of which two begin alike each, greedy and drawn, more of them than the pool has room for."""
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


def test_steps_run_ahead_and_say_what_one_rank_says(options: dict[str, Any], make_engine: Make) -> None:
    """Tokens that nobody knows yet are rank 0's samples on every rank."""
    options["num_gpu_blocks_override"] = 400
    expected = said(make_engine(**options, async_scheduling=False))
    engine = make_engine(**options, async_scheduling=True, tensor_parallel_size=2)
    assert said(engine) == expected
    counts = engine.overlaps
    assert counts.overlapped > counts.steps / 2, counts.summary()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_blocks_go_down_and_come_back_on_all_ranks(
    is_ahead: bool, options: dict[str, Any], make_engine: Make, tmp_path: Path
) -> None:
    """Sizes and bytes are of all ranks together; a record that one rank alone has lost is computed again."""
    tiers = {"host_kv_memory_bytes": 6 * BLOCK_BYTES, "preemption": "swap", "async_scheduling": is_ahead}
    path = tmp_path / "tier"
    alone = make_engine(**options, **tiers, disk_kv_memory_bytes=200 * RECORD_BYTES)
    expected = said(alone)
    engine = make_engine(
        **options,
        **tiers,
        disk_kv_memory_bytes=400 * RECORD_BYTES,  # a record of each rank's part takes a whole sector
        disk_kv_path=str(path),
        tensor_parallel_size=2,
    )
    assert said(engine) == expected
    stats, before = engine.components.mover.stats, alone.components.mover.stats
    assert stats is not None
    assert before is not None
    cache = engine.hello.cache
    assert (cache.num_host_blocks, cache.num_disk_blocks) == (6, 200)
    assert stats.saved_bytes > 0
    assert stats.offloaded_bytes > 0
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
    assert said(engine) == expected
    assert list(tmp_path.glob("tier*")) == []


def wipe(pid: int, path: str) -> None:
    """What a process has in a file whose name is gone."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{number}"
        if os.path.lexists(link) and os.readlink(link).startswith(path):
            size = os.stat(link).st_size
            with open(link, "r+b") as file:
                file.write(bytes(size))
            return
    raise AssertionError(f"nobody has {path}")
