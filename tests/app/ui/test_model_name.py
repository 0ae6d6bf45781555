"""Tests of the displayed model name."""

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
    ("name", "shown"),
    [
        ("default", "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/mine/", "mine"),
        ("a.gguf", "a.gguf"),
        ("/", "/"),
    ],
)
def test_model_name_is_the_last_part_of_a_path(name, shown):
    assert model_name(hello(name)) == shown


def test_model_name_is_empty_without_an_engine():
    assert model_name(None) == ""
