"""GGUF files are converted once, verified at each start, rebuilt if damaged, and complete despite concurrent
conversions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tests.warm_python import WarmPython
from transformers import PreTrainedModel

from kvscope_engine.model.loader.gguf import gguf_cache
from kvscope_engine.model.loader.gguf.gguf_cache import MANIFEST, converted_gguf, is_intact
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import Progress

CONVERT = """
import sys
from pathlib import Path
import torch
from kvscope_engine.model.loader.gguf import gguf_cache
convert = gguf_cache.convert_gguf
def counted(*arguments):
    print("converts", file=sys.stderr, flush=True)
    convert(*arguments)
gguf_cache.convert_gguf = counted
print(gguf_cache.converted_gguf(Path(sys.argv[1]), torch.float32, lambda _: None), file=sys.stderr)
"""


@pytest.fixture
def entry(tiny_gguf: Callable[..., Path], own_cache: Path, progress_events: list[Progress]) -> Path:
    """The converted `tiny.gguf` in its own cache."""
    entry = converted_gguf(tiny_gguf(), torch.float32, progress_events.append)
    progress_events.clear()
    return entry


def convert_again(entry: Path, progress_events: list[Progress]) -> Path:
    """Convert the same file again."""
    return converted_gguf(entry.parents[2] / "tiny.gguf", torch.float32, progress_events.append)


def test_converting_a_gguf_file_again_uses_the_cached_conversion(
    entry: Path, own_cache: Path, progress_events: list[Progress]
) -> None:
    assert entry.is_relative_to(own_cache)
    assert convert_again(entry, progress_events) == entry
    assert progress_events == []
    assert {"config.json", "model.safetensors", "tokenizer.json", MANIFEST} <= {path.name for path in entry.iterdir()}


def test_copy_of_a_gguf_file_uses_the_same_cached_conversion(
    entry: Path, tiny_gguf: Callable[..., Path], progress_events: list[Progress]
) -> None:
    assert converted_gguf(tiny_gguf("copy.gguf"), torch.float32, progress_events.append) == entry
    assert converted_gguf(tiny_gguf("other.gguf", seed=1), torch.float32, progress_events.append) != entry


def test_gguf_conversion_to_another_dtype_is_cached_separately(entry: Path, progress_events: list[Progress]) -> None:
    other = converted_gguf(entry.parents[2] / "tiny.gguf", torch.bfloat16, progress_events.append)
    assert other != entry
    assert is_intact(entry)
    assert is_intact(other)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "empty"])
def test_damaged_gguf_conversion_in_the_cache_is_detected(entry: Path, name: str, damage: str) -> None:
    file = entry / name
    content = file.read_bytes()
    assert is_intact(entry)
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(
            {"cut": content[:-1], "changed": content[:9] + bytes([content[9] ^ 1]) + content[10:], "empty": b""}[damage]
        )
    assert not is_intact(entry)


def test_damaged_gguf_conversion_in_the_cache_is_rebuilt(entry: Path, progress_events: list[Progress]) -> None:
    weights = entry / "model.safetensors"
    content = weights.read_bytes()
    os.truncate(weights, len(content) // 2)
    assert convert_again(entry, progress_events) == entry
    assert weights.read_bytes() == content
    assert progress_events


def test_invalid_gguf_file_leaves_nothing_in_the_conversion_cache(
    tiny_gguf: Callable[..., Path], own_cache: Path
) -> None:
    gguf = tiny_gguf(without=["blk.0.attn_v.weight"])
    with pytest.raises(BadInput):
        converted_gguf(gguf, torch.float32, lambda _: None)
    assert [path.name for path in (own_cache / "converted").iterdir() if path.is_dir()] == []


def test_full_disk_while_converting_a_gguf_file_is_reported(
    tiny_gguf: Callable[..., Path], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_cache, "convert_gguf", full)
    with pytest.raises(KvscopeError, match="No space left"):
        converted_gguf(tiny_gguf(), torch.float32, lambda _: None)


def test_full_disk_while_writing_weights_is_reported(
    tiny_gguf: Callable[..., Path], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Safetensors raises its own error for it."""

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(KvscopeError, match=r"^cannot write the converted model to .*: No space left on device;"):
        converted_gguf(tiny_gguf(), torch.float32, lambda _: None)
    assert [path.name for path in (own_cache / "converted").iterdir() if path.is_dir()] == []


def test_two_processes_convert_once(tiny_gguf: Callable[..., Path], own_cache: Path, warm_python: WarmPython) -> None:
    gguf = tiny_gguf()
    both = [warm_python.start(["-c", CONVERT, str(gguf)]) for _ in range(2)]
    said = []
    for process in both:
        with process.stderr as progress_events:
            said.append(progress_events.read().split())
    assert [process.wait(240) for process in both] == [0, 0]
    assert said[0][-1] == said[1][-1]
    assert sum(lines.count("converts") for lines in said) == 1
    assert is_intact(Path(said[0][-1]))


def test_drive_that_fills_up_while_writing_is_reported(
    tiny_gguf: Callable[..., Path], own_cache: Path, warm_python: WarmPython
) -> None:
    """The library that writes raises its own error for it."""
    program = f"""
import resource, torch
from pathlib import Path
from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf
gguf = Path({str(tiny_gguf())!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
converted_gguf(gguf, torch.float32, lambda _: None)
"""
    done = warm_python.run(["-c", program])
    last = done.stderr.splitlines()[-1]
    assert "KvscopeError: cannot write the converted model to" in last
    assert "File too large; free space" in last
