"""Mamba 2's in-place state update equals transformers' and is the one that such layers call."""

from __future__ import annotations

import pytest
import torch
from tests.engine.recurrent_models import recurrent_model
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

from kvscope_engine.model.layers.recurrent import mamba_update
from kvscope_engine.model.layers.recurrent.mamba_update import update_in_place, with_in_place_update


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_mamba_2_state_update_in_place_equals_transformers(dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(groups)
    state = torch.randn(2, 6, 8, 5)
    hidden, bias = torch.randn(2, 6, 8, dtype=dtype), torch.randn(6, dtype=dtype)[:, None].expand(-1, 8)
    dt = torch.randn(2, 6, 1, dtype=dtype).expand(-1, -1, 8)
    decay = -torch.rand(6)[:, None, None].expand(-1, 8, 5)
    b, c = (torch.randn(2, groups, 5, dtype=dtype) for _ in range(2))
    skip, gate = torch.randn(6, dtype=dtype)[:, None].expand(-1, 8), torch.randn(2, 6, 8, dtype=dtype)
    found, wanted = state.clone(), state.clone()
    for z in (None, gate):
        given = (hidden, dt, decay, b, c, skip)
        out = update_in_place(found, *given, z=z, dt_bias=bias, dt_softplus=True)
        expected = mamba2_selective_state_update(wanted, *given, z=z, dt_bias=bias, dt_softplus=True)
        assert out.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # except for the last bits of exponentials
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("family", "is_one"), [("mamba2", True), ("bamba", True), ("jamba", False)])
def test_mamba_2_layers_call_the_update_in_place(family: str, is_one: bool) -> None:
    module = recurrent_model(family)
    forwards = [with_in_place_update(part, lambda: False) for part in module.modules() if hasattr(part, "A_log")]
    assert all(forward is not None for forward in forwards) is is_one
    assert mamba2_selective_state_update.__name__ == mamba_update.UPDATE_FUNCTION
