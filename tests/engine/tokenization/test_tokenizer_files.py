"""A tokenizer that was saved to a folder is loaded unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope_engine.http.schemas.chat_rendering import conversation_text
from kvscope_engine.http.schemas.request_bodies import MessageBody
from kvscope_engine.tokenization import tokenizer_files
from kvscope_engine.tokenization.tokenizer_files import (
    EXTRAS_FILE,
    PROCESSOR_TEMPLATE_FILE,
    load_tokenizer,
    save_tokenizer,
)
from kvscope_telemetry.errors import BadInput

MESSAGES = [{"role": "user", "content": "Hi </s> é"}]


def test_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_files_of_transformers_are_loaded(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert (
        loaded.chat(MESSAGES) == tiny_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    )
    assert loaded.eos_token_id == 2


def test_own_files_are_loaded_without_transformers(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tiny_tokenizer, tmp_path)
    monkeypatch.setattr(tokenizer_files, "from_transformers", None)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert (
        loaded.chat(MESSAGES) == tiny_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    )
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert json.loads((tmp_path / EXTRAS_FILE).read_bytes())["chat_template"] == tiny_tokenizer.chat_template


def test_default_template_of_several_is_used(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_tokenizer.chat_template = {"default": "{{ messages[0].content }}", "answer_format": "x"}
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.chat_text(MESSAGES) == MESSAGES[0]["content"]


def test_broken_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "nothing"}}')
    with pytest.raises(BadInput, match="cannot be read") as refused:
        load_tokenizer(tmp_path)
    assert repr(str(tmp_path)) in str(refused.value)
    assert "\n" not in str(refused.value)


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def test_template_that_reads_content_parts_is_given_parts(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_tokenizer.chat_template = None
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / PROCESSOR_TEMPLATE_FILE).write_text(json.dumps({"chat_template": PARTS}))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.chat_text(MESSAGES) == f"<user>{MESSAGES[0]['content']}"
    asked = msgspec.convert(MESSAGES, list[MessageBody])
    assert conversation_text(loaded, asked) == f"<user>{MESSAGES[0]['content']}"
