"""The benchmark probe counts the prompt tokens that its engine computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope_engine.bench.on_gpu.probe import Probe
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError


def test_unexpected_number_of_computed_tokens_is_an_error(tiny_model: Callable[..., str]) -> None:
    with Probe(EngineConfig(model=tiny_model(), device="cpu", num_gpu_blocks_override=8)) as probe:
        prompt = probe.ids(40)
        assert probe.first_token_s(prompt, num_computed=40) > 0
        assert probe.first_token_s(prompt, num_computed=8) > 0, "two blocks of 16 are cached"
        with pytest.raises(KvscopeError, match="8 of 40 prompt tokens were computed; 40 were expected"):
            probe.first_token_s(prompt, num_computed=40)
