"""Graphs of steps with prefills give the same tokens as eager steps, replayed by an emulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import piecewise_sizes
from kvscope_engine.model.loaded_model import LoadedModel

Load = Callable[..., LoadedModel]
NUM_TOKENS = 9


def test_piecewise_graph_sizes_go_up_to_512_or_the_token_limit_if_smaller() -> None:
    assert piecewise_sizes(8192) == (16, 32, 64, 128, 256, 512)
    assert piecewise_sizes(100) == (16, 32, 64, 100)
    assert piecewise_sizes(16) == (16,)
    assert piecewise_sizes(7) == (7,)


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 320, length).tolist() for length in rng.integers(1, 40, count)]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma2", "youtu"])
def test_random_mixed_steps_give_the_tokens_of_eager_attention(
    model_type: str, tiny_loaded: Load, planned: Any, eager_tokens: Any, cpu_graphs: Any
) -> None:
    """With fused and plain layers, windows and soft caps; chunks of all lengths next to decodes, and preemptions."""
    asked = prompts(7, 12)
    reference = tiny_loaded(model_type)
    expected = [eager_tokens(reference, prompt, NUM_TOKENS) for prompt in asked]
    run, generator = planned(tiny_loaded(model_type), num_blocks=256), random.Random(1)
    run.free.sort(reverse=True)  # the first block is used first, where written padding would show
    for prompt in asked:
        run.add(prompt, NUM_TOKENS)
        for _ in range(3):
            run.step(max_chunk=generator.randint(1, 8))
        running = [request for request in run.requests if len(request.output_token_ids) < NUM_TOKENS]
        if running and generator.random() < 0.5:
            run.preempt(generator.choice(running))
    assert run.run(max_chunk=11) == expected
    assert run.runner.notes == []
    assert cpu_graphs.replays >= 3 * 10, "at least ten steps of two layers"


def test_cuda_graph_emulation_fills_memory_freed_during_capture_with_nan(
    tiny_loaded: Load, planned: Any, cpu_graphs: Any
) -> None:
    """The emulation detects a tensor that is used after it was freed, and one that was computed only once."""
    first, kept = cpu_graphs.make(), torch.ones(4)
    source = torch.ones(4)
    first.capture_begin(pool=(0, 1), capture_error_mode="")
    doubled = source * 2
    kept.copy_(doubled)
    first.capture_end()
    assert doubled.isnan().all()
    held = doubled.detach()
    source.fill_(5)
    first.replay()
    assert kept.tolist() == held.tolist() == [10.0] * 4
    del doubled
    first.replay()
    assert kept.tolist() == [10.0] * 4
    assert held.isnan().all()


def test_model_that_reads_on_the_host_runs_without_graphs(
    tiny_loaded: Load, planned: Any, eager_tokens: Any, cpu_graphs: Any
) -> None:
    """There is no capture and one notice, and the tokens are the same."""
    asked = prompts(8, 4)
    reference = tiny_loaded("llama")
    expected = [eager_tokens(reference, prompt, NUM_TOKENS) for prompt in asked]
    loaded = tiny_loaded("llama")
    run = planned(loaded, num_blocks=256)
    norm: Any = loaded.module.get_submodule("model.norm")
    plain = norm.forward

    def reading(x: torch.Tensor) -> torch.Tensor:
        assert x.max().item() < 1e9
        return plain(x)  # type: ignore[no-any-return]

    norm.forward = reading
    for prompt in asked:
        run.add(prompt, NUM_TOKENS)
    assert run.run(max_chunk=3) == expected
    (note,) = run.runner.notes
    assert note.startswith(
        "no CUDA graph for steps with prefills, which run slower: RuntimeError: CUDA error: operation"
    )
    assert cpu_graphs.replays == 0
