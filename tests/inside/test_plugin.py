"""vLLM loads the plugin in each of its processes: it does nothing by default and imports little."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from kvscope_inside.vllm import plugin


def test_vllm_finds_the_plugin() -> None:
    (found,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "kvscope"]
    assert found.load() is plugin.load


def test_plugin_does_nothing_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.ENDPOINT, raising=False)
    plugin.load()  # vLLM is not installed here
    assert "vllm" not in sys.modules


def test_loading_the_plugin_imports_neither_sockets_nor_numpy() -> None:
    code = (
        "import sys; from kvscope_inside.vllm.plugin import load; load();"
        "print(sorted({'zmq', 'numpy', 'msgspec', 'torch', 'httpx'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
