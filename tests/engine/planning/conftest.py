"""Configurations of small models, and the peak memory of torch's allocator."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvscope_engine.bench.shapes import SHAPES
from kvscope_engine.planning.skeleton import Skeleton, read_skeleton

SMALL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 3000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
LLAMA_8B = SHAPES["8b"] | {"max_position_embeddings": 131072}
Make = Callable[..., Skeleton]


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Function that returns the skeleton of a configuration with changes. Each is read once, so that a plan's
    measurements are reused.
    """
    path = tmp_path_factory.mktemp("skeleton") / "config.json"
    known: dict[str, Skeleton] = {}

    def make(base: Mapping[str, object] = SMALL, **changes: object) -> Skeleton:
        config = json.dumps({**base, **changes})
        if config not in known:
            path.write_text(config)
            known[config] = read_skeleton(str(path))
        return known[config]

    return make


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the peak of bytes allocated by torch while `run` ran, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert peak, "the profiler saw no memory"
    return peak


def close(got: float, real: float) -> bool:
    """Return whether two sizes differ by at most 5 %."""
    return abs(got - real) <= 0.05 * real


torch.manual_seed(0)
