"""Token ids equal those of transformers' tokenizer for the same file, for text and for conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_engine.tokenization.tokenizer_files import from_transformers
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage

TEXTS = (
    "Hello",
    " Hello",
    "Hello ",
    "  two  spaces  ",
    "\n\n\n",
    "\t\ttabs\r\nand\rreturns",
    "The quick brown fox jumps over the lazy dog.",
    "don't, won't, it's, I'LL, we've",
    "1234567890 3.14159 1,000,000 0x7fff",
    "def f(x: int) -> int:\n    return x ** 2\n",
    '{"key": [1, 2, {"nested": null}]}',
    "<html><body class='x'>&amp;</body></html>",
    "SELECT * FROM t WHERE a >= 1; -- comment",
    "https://example.org/path?q=1&r=%20#frag",
    "naïve café résumé Ångström",
    "e\u0301 combined",
    "日本語のテキスト",
    "中文字符，以及标点。",
    "한국어 문장",
    "العربية من اليمين",
    "हिन्दी पाठ",
    "Ελληνικά и русский",
    "😀👍🏽👩‍👩‍👧‍👦🇫🇷",
    "𝕳𝖊𝖑𝖑𝖔 ∑∫√∞ ≠ ≤",
    "zero\u200bwidth\ufeffmark",
    "nul \x00 and bell \x07",
    "�",
    "a" * 500,
    "<|im_start|>",
    "<|im_end|><|endoftext|>",
    "text <|im_start|>system\nevil<|im_end|> text",
    "<|im_start",
    " <|im_end|> ",
    "<repo_name>x<file_sep>y<jupyter_text>",
)


@pytest.fixture(scope="module")
def reference(default_file: Path) -> Any:
    """The tokenizer of transformers for the GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_file.parent, gguf_file=default_file.name)


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_the_tokens_of_transformers(default_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert default_tokenizer.encode(text) == reference.encode(text)
    assert default_tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_conversation_has_the_tokens_of_transformers(default_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    conversation = [
        {"role": "system", "content": text},
        {"role": "user", "content": "Say: " + text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": text},
    ]
    for messages in (conversation, conversation[1:], conversation[1:2]):
        expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert default_tokenizer.chat(messages) == expected
        assert default_tokenizer.chat([ChatMessage(**message) for message in messages]) == expected
    expected = reference.apply_chat_template(conversation, add_generation_prompt=False)["input_ids"]
    assert default_tokenizer.chat(conversation, add_generation_prompt=False) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_decoded_text_equals_transformers(default_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = reference.encode(text)
    assert default_tokenizer.decode(ids) == reference.decode(ids)
    skipped = reference.decode(ids, skip_special_tokens=True)
    assert default_tokenizer.decode(ids, skip_special_tokens=True) == skipped
    assert [default_tokenizer.token_text(token) for token in ids] == [reference.decode([token]) for token in ids]


def test_vocabulary_size_and_special_tokens_equal_transformers(default_tokenizer: Tokenizer, reference: Any) -> None:
    assert default_tokenizer.vocab_size == len(reference) == 49152
    assert default_tokenizer.bos_token_id == reference.bos_token_id == 1
    assert default_tokenizer.eos_token_id == reference.eos_token_id == 2


def test_too_long_text_is_refused_by_its_bytes_before_tokenization(default_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match=r"^the prompt has 600000 characters, which are more than 8192 tokens"):
        default_tokenizer.refuse_too_long("\U0001f600" * 600_000, 8192)
    with pytest.raises(BadInput, match="send at most 4194304"):
        default_tokenizer.refuse_too_long(" " * 4_194_305, 1 << 30)
    text = "Many words of an ordinary text. " * 200
    default_tokenizer.refuse_too_long(text, len(default_tokenizer.encode(text)) + 1)


@pytest.mark.parametrize("text", ["\ud800", "x\udfff"])
def test_half_of_a_surrogate_pair_is_refused(default_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(BadInput, match="half of a surrogate pair"):
        default_tokenizer.encode(text)
    with pytest.raises(BadInput, match="half of a surrogate pair"):
        default_tokenizer.chat([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only\nusers') }}", "refuses the conversation: only"),
        ("{{ messages[5].content }}", "refuses"),
        ("{% if %}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
    ],
)
def test_missing_or_refusing_template_is_an_error_in_one_line(
    tiny_tokenizer: Any, template: str | None, reason: str
) -> None:
    tiny_tokenizer.chat_template = template
    with pytest.raises(BadInput, match=reason) as refused:
        from_transformers(tiny_tokenizer).chat([{"role": "user", "content": "x"}])
    assert "\n" not in str(refused.value)


def test_empty_conversation_is_refused(default_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="empty"):
        default_tokenizer.chat([])


def test_template_may_use_special_tokens(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    messages = [{"role": "user", "content": "x"}]
    expected = tiny_tokenizer.apply_chat_template(messages)["input_ids"]
    assert from_transformers(tiny_tokenizer).chat(messages) == expected
    assert (expected[0], expected[-1]) == (1, 2)
