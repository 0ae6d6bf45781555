"""Streamed text equals the decoded text for all tokens, and stop strings end it wherever tokens begin."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvscope_engine.tokenization.tokenizer import MAX_WINDOW, Detokenizer, Tokenizer

TEXTS = (
    "The capital of France is Paris.",
    "def f(x):\n\treturn  x ** 2  # naïve\n\n\n",
    "日本語のテキストと中文，以及한국어.",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 thumb, é combined",
    "   leading and trailing   ",
    "�real replacement� and \x00 control \u200b zero width",
)
Decode = Callable[[Sequence[int]], str]


def streamed_pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Return the pieces; the last one is from `flush`."""
    return [*(detokenizer.add_token(token) for token in ids), detokenizer.flush()]


def by_character(text: str) -> Decode:
    """Return a decoder for which token i is character i of `text`."""
    return lambda ids: "".join(text[token] for token in ids)


@pytest.fixture(scope="module")
def byte_fallback() -> Backend:
    """A tokenizer like SentencePiece: spaces as marks, one stripped at the start, bytes as tokens."""
    words = ["<unk>", "▁", "▁Hello", "▁world", "Hello", ",", "▁▁", "é"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(words + bytes_)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_original(default_tokenizer: Tokenizer, text: str) -> None:
    pieces = streamed_pieces(default_tokenizer.detokenizer(), default_tokenizer.encode(text))
    assert "".join(pieces) == text


@pytest.mark.parametrize("text", TEXTS[:5])
def test_incomplete_character_is_never_sent(default_tokenizer: Tokenizer, text: str) -> None:
    pieces = streamed_pieces(default_tokenizer.detokenizer(), default_tokenizer.encode(text))
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_give_the_text_of_decoding_them_at_once(default_tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    halves = [index for token, index in default_tokenizer.vocabulary.items() if len(token) == 1]
    for _ in range(60):
        choices = halves if rng.random() < 0.5 else range(default_tokenizer.vocab_size)
        ids = rng.choices(choices, k=rng.randrange(1, 90))
        expected = default_tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(streamed_pieces(default_tokenizer.detokenizer(), ids)) == expected


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_streamed_byte_tokens_give_the_text_of_decoding_them_at_once(
    byte_fallback: Backend, data: st.DataObject
) -> None:
    character = st.sampled_from(["😀", "ñ", "中", "a", "\n"]).map(
        lambda text: [byte_fallback.token_to_id(f"<0x{value:02X}>") for value in text.encode()]
    )
    word = st.integers(1, 7).map(lambda token: [token])
    ids = list(chain.from_iterable(data.draw(st.lists(st.one_of(character, word), max_size=60))))
    pieces = streamed_pieces(Detokenizer(byte_fallback.decode), ids)
    assert "".join(pieces) == byte_fallback.decode(ids)
    assert not any("�" in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_streamed_text_after_a_context_equals_decoding_both_together(
    byte_fallback: Backend, data: st.DataObject
) -> None:
    tokens = st.integers(1, 7)
    context, ids = data.draw(st.lists(tokens, max_size=30)), data.draw(st.lists(tokens, max_size=40))
    pieces = streamed_pieces(Detokenizer(byte_fallback.decode, context=context), ids)
    assert byte_fallback.decode(context) + "".join(pieces) == byte_fallback.decode(context + ids)


def test_first_word_after_a_context_keeps_its_space(byte_fallback: Backend) -> None:
    hello, world = byte_fallback.token_to_id("▁Hello"), byte_fallback.token_to_id("▁world")
    assert streamed_pieces(Detokenizer(byte_fallback.decode, context=[hello]), [world, world])[0] == " world"
    assert streamed_pieces(Detokenizer(byte_fallback.decode), [world, world])[0] == "world"


def test_character_begun_in_the_context_is_sent_whole(byte_fallback: Backend) -> None:
    first, *rest = [byte_fallback.token_to_id(f"<0x{value:02X}>") for value in "é".encode()]
    hello = byte_fallback.token_to_id("▁Hello")
    assert "".join(streamed_pieces(Detokenizer(byte_fallback.decode, context=[hello, first]), rest)) == "é"


def test_stop_string_is_not_searched_in_the_context(byte_fallback: Backend) -> None:
    hello = byte_fallback.token_to_id("▁Hello")
    detokenizer = Detokenizer(byte_fallback.decode, ["Hello"], context=[hello])
    assert detokenizer.add_token(hello) == " "
    assert detokenizer.stopped


def test_special_tokens_are_skipped(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert "".join(streamed_pieces(default_tokenizer.detokenizer(), ids)) == "user\nHi"


def test_invalid_bytes_are_sent_after_a_bounded_wait(default_tokenizer: Tokenizer) -> None:
    lead_byte = default_tokenizer.vocabulary["Ã"]
    assert default_tokenizer.decode([lead_byte]) == "�"
    detokenizer = default_tokenizer.detokenizer()
    pieces = [detokenizer.add_token(lead_byte) for _ in range(3 * MAX_WINDOW)]
    assert "".join(pieces) == "�" * (3 * MAX_WINDOW)


@given(
    text=st.text(alphabet="ab.", max_size=60),
    stop=st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=examples(300), deadline=None)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(by_character(text), stop)
    shown, ended = "", None
    for token in range(len(text)):
        shown += detokenizer.add_token(token)
        assert text.startswith(shown)
        if detokenizer.stopped:
            ended = token
            break
    shown += detokenizer.flush()
    ends = [text.find(string) + len(string) for string in stop if string in text]
    if not ends:
        assert (shown, ended) == (text, None)
        return
    assert ended == min(ends) - 1
    first = min(text[: min(ends)].find(string) for string in stop if string in text[: min(ends)])
    assert shown == text[:first]


def test_stop_string_across_tokens_is_found(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("One two three STOPPED four")
    detokenizer = default_tokenizer.detokenizer(("e STOP",))
    text = "".join(streamed_pieces(detokenizer, ids))
    assert text == "One two thre"
    assert detokenizer.stopped


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(by_character("a##b"), ("###",))
    assert [detokenizer.add_token(token) for token in range(4)] == ["a", "", "", "##b"]
    assert not detokenizer.stopped


def test_text_held_back_for_a_stop_string_is_returned_by_flush() -> None:
    detokenizer = Detokenizer(by_character("a##"), ("###",))
    assert [detokenizer.add_token(token) for token in range(3)] == ["a", "", ""]
    assert detokenizer.flush() == "##"
    assert detokenizer.flush() == ""


def test_stop_string_below_min_tokens_does_not_stop() -> None:
    detokenizer = Detokenizer(by_character("a.b.c"), (".",))
    pieces = [detokenizer.add_token(token, may_stop=token >= 2) for token in range(5)]
    assert pieces == ["a", ".", "b", "", ""]
    assert detokenizer.stopped


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(by_character("ab"), ("a",))
    assert [detokenizer.add_token(0), detokenizer.add_token(1), detokenizer.flush()] == ["", "", ""]
