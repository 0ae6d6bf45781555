"""What a model is called."""

from __future__ import annotations

import pytest

from kvscope_app.ui.model_name import model_name
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo


def hello(name):
    return Hello(
        epoch=1,
        time_ns=1,
        wall_time_ns=1,
        model=ModelInfo(name=name),
        cache=CacheInfo(num_blocks=1, block_size=1),
        device=DeviceInfo(kind="cpu"),
    )


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("default", "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/mine/", "mine"),
        ("a.gguf", "a.gguf"),
        ("/", "/"),
    ],
)
def test_the_last_part_of_a_path(name, read):
    assert model_name(hello(name)) == read


def test_no_engine_no_name():
    assert model_name(None) == ""
