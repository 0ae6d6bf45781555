"""GGUF headers are read within their own bounds: truncated or changed files are accepted or refused, quickly."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.model.loader.gguf.gguf_header import check_gguf
from kvscope_telemetry.errors import BadInput


@pytest.fixture
def file(tiny_gguf: Callable[..., Path]) -> Path:
    return tiny_gguf()


def test_valid_header_is_read(file: Path) -> None:
    header = check_gguf(file)
    assert header.architecture == "llama"
    assert header.fields["llama.block_count"] == 2
    assert header.fields["general.name"] == "tiny"
    assert len(header.shapes) == 20
    assert header.shapes["blk.1.ffn_down.weight"] == (96, 64)


def test_default_model_header_is_read(default_file: Path) -> None:
    header = check_gguf(default_file)
    assert len(header.shapes) == 272
    assert header.fields["llama.context_length"] == 8192


def test_file_truncated_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    cuts = [0, 1, 3, 4, 8, 12, 23, 24, *random.Random(0).sample(range(25, len(content) - 1), 200), len(content) - 1]
    for cut in cuts:
        file.write_bytes(content[:cut])
        with pytest.raises(BadInput) as refused:
            check_gguf(file)
        assert str(file) in str(refused.value)


def test_file_with_any_byte_changed_is_refused_or_stays_within_bounds(file: Path) -> None:
    """Every changed value is judged; an accepted file has all tensors within the file."""
    content = file.read_bytes()
    rng = random.Random(1)
    head = content.index(b"output_norm.weight") + 60
    num_refused = 0
    for _ in range(600):
        changed = bytearray(content)
        changed[rng.randrange(head)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        file.write_bytes(changed)
        try:
            header = check_gguf(file)
        except BadInput as error:
            num_refused += "\n" not in str(error)
        else:
            assert max(max(shape) for shape in header.shapes.values()) < len(content)
    assert num_refused > 40


def test_random_bytes_after_the_magic_are_refused(file: Path) -> None:
    rng = random.Random(2)
    for _ in range(300):
        file.write_bytes(b"GGUF" + struct.pack("<I", 3) + rng.randbytes(rng.randrange(400)))
        with pytest.raises(BadInput):
            check_gguf(file)


def replace_after(content: bytes, mark: bytes, offset: int, code: str, value: Any) -> bytes:
    """Return `content` with the number that is `offset` bytes after the end of `mark` replaced."""
    changed = bytearray(content)
    struct.pack_into(f"<{code}", changed, content.index(mark) + len(mark) + offset, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("mark", "offset", "code", "value", "reason"),
    [
        (b"GGUF", 0, "I", 1, "version 1"),
        (b"GGUF", 0, "I", 0x03000000, "big-endian"),
        (b"GGUF", 4, "Q", 1 << 62, "tensors"),
        (b"GGUF", 12, "Q", 1 << 62, "fields"),
        (b"GGUF", 20, "Q", (1 << 64) - 1, "truncated"),
        (b"llama.block_count", 4, "I", 1 << 31, "block_count"),
        (b"llama.embedding_length", 4, "I", 1 << 31, "embedding_length"),
        (b"llama.vocab_size", 4, "I", 0, "vocab_size"),
        (b"tokenizer.ggml.tokens", 8, "Q", 1 << 60, "strings"),
        (b"tokenizer.ggml.tokens", 4, "I", 9, "unknown type 9"),
        (b"tokenizer.ggml.token_type", 8, "Q", 1 << 60, "numbers"),
        (b"token_embd.weight", 0, "I", 5, "dimensions"),
        (b"token_embd.weight", 0, "I", 0, "dimensions"),
        (b"token_embd.weight", 4, "Q", 1 << 63, "cut short or damaged"),
        (b"token_embd.weight", 4, "Q", 0, "dimensions"),
        (b"token_embd.weight", 20, "I", 999, "unknown type"),
        (b"token_embd.weight", 24, "Q", 1 << 63, "cut short or damaged"),
        (b"token_embd.weight", 24, "Q", 1, "cut short or damaged"),
        (b"output_norm.weight", 12, "I", 2, None),
    ],
)
def test_impossible_header_value_is_refused(
    file: Path, mark: bytes, offset: int, code: str, value: int, reason: str | None
) -> None:
    file.write_bytes(replace_after(file.read_bytes(), mark, offset, code, value))
    if reason is None:  # other values of the same size or less: the loader judges them
        check_gguf(file)
        return
    with pytest.raises(BadInput, match=reason):
        check_gguf(file)


def test_overlapping_tensors_are_refused(file: Path) -> None:
    """Many names for the same bytes would need far more memory than the file has."""
    content = file.read_bytes()
    for index in range(2):
        for part in ("ffn_gate", "ffn_up", "ffn_down"):
            content = replace_after(content, f"blk.{index}.{part}.weight".encode(), 4 + 8, "Q", 320)
            content = replace_after(content, f"blk.{index}.{part}.weight".encode(), 4 + 16 + 4, "Q", 0)
    file.write_bytes(content)
    with pytest.raises(BadInput, match="take"):
        check_gguf(file)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04", b"\x00" * 4096])
def test_file_that_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(BadInput, match=r"x\.gguf"):
        check_gguf(tmp_path / "x.gguf")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        check_gguf(tmp_path)
