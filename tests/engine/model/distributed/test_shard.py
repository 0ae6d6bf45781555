"""Shards of a model, added up by threads of this process, give the tokens of the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from kvscope_engine.model.distributed.rank import Rank
from kvscope_engine.model.distributed.shard import check_fused
from kvscope_engine.model.layers.fused.all_reduce import install_all_reduce
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.runner.kv_cache_spec import storage_for_model
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

WAIT_S = 120.0
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 1},
}
PROMPTS = (range(3, 20), range(40, 45), range(100, 130))


class ThreadAllReduce:
    """All-reduce among threads: each contributes its part and gets the sum."""

    def __init__(self, count: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * count
        self._barrier = threading.Barrier(count, timeout=WAIT_S)

    def of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def all_reduce(part: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = part
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return total

        return all_reduce


class FollowerQueues:
    """Passes rank 0's steps to the other ranks' queues; None ends them."""

    def __init__(self, count: int) -> None:
        self.queues: list[Queue[tuple[Any, ...] | None]] = [Queue() for _ in range(count)]

    def send_step(self, *step: Any) -> None:
        for queue in self.queues:
            queue.put(step)

    def report_step_done(self) -> None:
        pass


@pytest.fixture
def load_shard(tmp_path: Path) -> Callable[..., LoadedModel]:
    """Function that loads a rank's shard of a tiny random model with fused layers."""

    def load(kind: str, rank: Rank, **changes: Any) -> LoadedModel:
        from transformers import AutoConfig

        path = tmp_path / f"{kind}.json"
        config = AutoConfig.for_model(kind, **(SIZES | changes))
        config.to_json_file(path, use_diff=False)
        options = EngineConfig(model=f"dummy:{path}", device="cpu", dtype="float32", quantization="none")
        loaded = load_model(options, lambda _: None, rank)
        fused = make_ready_to_run(loaded.module)
        check_fused(fused.layers, loaded.num_layers, rank, "tiny")
        return loaded

    return load


def follow(runner: ModelRunner, queue: Queue[tuple[Any, ...] | None]) -> None:
    while (step := queue.get(timeout=WAIT_S)) is not None:
        runner.run_as_follower(*step)


def tokens_of(loaded: list[LoadedModel], planned: Any) -> list[list[int]]:
    """Return the tokens of all prompts, run with one rank per model."""
    sums, others = ThreadAllReduce(len(loaded)), FollowerQueues(len(loaded) - 1)
    run = planned(loaded[0])
    run.runner._others = others
    runners = [
        ModelRunner(one, storage_for_model(one, 64, 4), RunnerConfig(max_num_seqs=8, max_num_batched_tokens=64))
        for one in loaded[1:]
    ]
    for rank, one in enumerate(loaded):
        install_all_reduce(one.module, sums.of(rank))
    for prompt in PROMPTS:
        run.add(prompt, 12)
    with ThreadPoolExecutor(len(loaded)) as pool:
        running = [pool.submit(follow, *pair) for pair in zip(runners, others.queues, strict=True)]
        try:
            found: list[list[int]] = run.run(max_chunk=7)
        finally:
            for queue in others.queues:
                queue.put(None)
        for ran in running:
            ran.result(WAIT_S)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_the_same_on_one_two_and_four_ranks(kind: str, load_shard: Any, planned: Any) -> None:
    """Includes fewer KV heads than ranks, and biases, which are added once."""
    found = {
        count: tokens_of([load_shard(kind, Rank(index, count), **MODELS[kind]) for index in range(count)], planned)
        for count in (1, 2, 4)
    }
    assert found[2] == found[1]
    assert found[4] == found[1]
    assert len({tuple(tokens) for tokens in found[1]}) == len(PROMPTS)


def test_shard_has_its_share_of_the_kv_bytes(load_shard: Any) -> None:
    def numbers(loaded: LoadedModel) -> int:
        return storage_for_model(loaded, 8, 4).num_bytes

    whole, half = load_shard("llama", Rank()), load_shard("llama", Rank(1, 2))
    assert numbers(half) * 2 == numbers(whole)
    assert (half.num_query_heads, half.num_kv_heads) == (4, 2)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    ],
)
def test_layers_that_cannot_be_sharded_are_refused(kind: str, changes: dict[str, Any], load_shard: Any) -> None:
    with pytest.raises(
        BadInput, match=r"tensor_parallel_size=2 is not accepted .* only layers like those of Llama can be split"
    ):
        load_shard(kind, Rank(0, 2), **changes)
