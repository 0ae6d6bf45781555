"""vLLM loads the plugin in each of its processes: it does nothing unless asked, and imports next to nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from kvscope_inside.vllm import plugin


def test_vllm_finds_it() -> None:
    (found,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "kvscope"]
    assert found.load() is plugin.load


def test_it_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.ENDPOINT, raising=False)
    plugin.load()  # there is no vLLM here that it could import
    assert "vllm" not in sys.modules


def test_loading_it_imports_neither_sockets_nor_numpy() -> None:
    code = (
        "import sys; from kvscope_inside.vllm.plugin import load; load();"
        "print(sorted({'zmq', 'numpy', 'msgspec', 'torch', 'httpx'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
