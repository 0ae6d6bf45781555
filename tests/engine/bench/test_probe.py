"""An engine that a benchmark drives counts the prompt tokens that it computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope_engine.bench.on_gpu.probe import Probe
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError


def test_measuring_something_else_than_expected_is_an_error(tiny_model: Callable[..., str]) -> None:
    with Probe(EngineConfig(model=tiny_model(), device="cpu", num_gpu_blocks_override=8)) as probe:
        prompt = probe.ids(40)
        assert probe.first_token_s(prompt, num_computed=40) > 0
        assert probe.first_token_s(prompt, num_computed=8) > 0, "two blocks of 16 are cached"
        with pytest.raises(KvscopeError, match="8 prompt tokens of 40 were computed, where 40 were to be"):
            probe.first_token_s(prompt, num_computed=40)
