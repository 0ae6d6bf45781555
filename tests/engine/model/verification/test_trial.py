"""Replacements are tried with large values and positions, where a few tokens at small positions would show nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.check_script import far_positions
from kvscope_engine.model.verification.trial import POSITIONS, ModuleCall, Trial, TrialContext, run_trial


def test_fusing_trial_includes_the_last_position_and_those_beyond_rope_scaling(
    tiny_loaded: Callable[..., LoadedModel],
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    module: Any = tiny_loaded("llama", rope_parameters=rope).module
    assert far_positions(module.config) == (64, 129, 255)
    seen = run_trial(module).calls[module.model.rotary_emb]
    positions = next(x for x in (*seen.args, *seen.kwargs.values()) if not x.is_floating_point())
    assert positions.tolist() == [[*POSITIONS, 64, 129, 255]]


class SaturatingModule(nn.Module):
    """Linear except for large numbers, by an unlisted operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 1000) * 1000


class ClampingModule(nn.Module):
    """Has a bound that even a thousand times the trial's numbers do not reach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1e9, 1e9)


@pytest.mark.parametrize("original", [SaturatingModule(), ClampingModule()], ids=["at large numbers", "by name"])
def test_replacement_that_differs_only_beyond_the_trial_values_is_not_trusted(original: nn.Module) -> None:
    x = torch.linspace(-2, 2, 64)
    trial = Trial(TrialContext(), {original: ModuleCall((x,), {}, original(x))})
    assert trial.proves(original, original.forward)
    assert not trial.proves(original, lambda x: x * 1.0)
