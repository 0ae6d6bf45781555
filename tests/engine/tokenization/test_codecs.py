"""Both kinds of codec do what transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.tokenization.tokenizer import FastCodec, PythonCodec
from kvscope_telemetry.errors import BadInput


def test_fast_codec_equals_transformers(tiny_tokenizer: Any) -> None:
    codec = FastCodec(tiny_tokenizer.backend_tokenizer)
    ids = codec.encode("<s>Hi é", add_special_tokens=True)
    assert ids == tiny_tokenizer.encode("<s>Hi é")
    assert codec.decode(ids, skip_special_tokens=True) == "Hi é"
    assert codec.decode(ids, skip_special_tokens=False) == "<s>Hi é"
    assert codec.vocabulary() == tiny_tokenizer.get_vocab()
    assert codec.has_any_character()


def test_truncation_and_padding_of_the_file_are_disabled(tiny_tokenizer: Any, tmp_path: Path) -> None:
    backend = tiny_tokenizer.backend_tokenizer
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(tmp_path / "tokenizer.json"))
    codec = FastCodec.from_file(tmp_path / "tokenizer.json")
    assert len(codec.encode("seven s", add_special_tokens=True)) == 7


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 1}'])
def test_invalid_tokenizer_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"tokenizer\.json is not a tokenizer"):
        FastCodec.from_file(tmp_path / "tokenizer.json")


def test_python_codec_equals_transformers(tmp_path: Path) -> None:
    from transformers import BertTokenizerLegacy

    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n##s\n")
    source: Any = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    codec = PythonCodec(source)
    ids = codec.encode("hello worlds", add_special_tokens=True)
    assert ids == source.encode("hello worlds") == [2, 5, 6, 7, 3]
    assert codec.decode(ids, skip_special_tokens=True) == "hello worlds"
    assert codec.vocabulary()["world"] == 6
    assert codec.fewest_tokens("hello " * 1000, 10) == 0
