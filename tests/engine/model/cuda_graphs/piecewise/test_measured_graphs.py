"""Attention measured in replayed decode graphs equals that measured layer by layer, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.layers.attention.attention_scores import MeasuredSteps
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.runner.model_runner import ModelRunner

Load = Callable[..., LoadedModel]
NUM_TOKENS = 9
LENGTHS = (3, 30, 7)


@pytest.fixture
def measured(planned: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[LoadedModel, bool], tuple[Any, list[Any]]]:
    """Function that returns tokens and the attention measured in each decode-only step, with or without graphs."""

    def run(loaded: LoadedModel, in_graphs: bool) -> tuple[Any, list[Any]]:
        found, shares = planned(loaded, num_blocks=256), list[Any]()
        runner: ModelRunner = found.runner
        runner._piecewise_graphs, runner._measures_shares, runner._measured = None, True, MeasuredSteps(1)
        if in_graphs:
            runner._graphs = DecodeGraphs(
                runner._eager_logits,
                runner._buffer,
                StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_request_tokens=256, block_size=4),
                measures_attention=True,
            )
            runner._graphs.capture_all()
        plain = runner.run

        def running(plan: Any) -> Any:
            result = plain(plan)
            if plan.num_single_token == len(plan.scheduled):
                assert result.block_shares is not None
                shares.append([row.copy() for row in result.block_shares[0]])
            return result

        monkeypatch.setattr(runner, "run", running)
        rng = np.random.default_rng(1)
        for length in LENGTHS:
            found.add(rng.integers(3, 320, length).tolist(), NUM_TOKENS)
        tokens = found.run()
        assert runner.notes == []
        return tokens, shares

    return run


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "youtu"])
def test_replayed_decode_graph_measures_the_same_attention_as_an_eager_step(
    model_type: str, tiny_loaded: Load, measured: Any, cpu_graphs: Any
) -> None:
    """With fused layers, windows and soft caps."""
    tokens, shares = measured(tiny_loaded(model_type), False)
    assert cpu_graphs.replays == 0
    replayed_tokens, replayed = measured(tiny_loaded(model_type), True)
    assert cpu_graphs.replays >= NUM_TOKENS - 3, "all but the first of a size"
    assert replayed_tokens == tokens
    assert len(replayed) == len(shares) == NUM_TOKENS - 1
    for step, expected in zip(replayed, shares, strict=True):
        for row, (found, wanted) in enumerate(zip(step, expected, strict=True)):
            width = min(len(found), len(wanted))
            np.testing.assert_allclose(found[:width], wanted[:width], atol=1e-5)
            assert found.sum() == pytest.approx(1.0, abs=1e-4), row
