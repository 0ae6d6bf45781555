"""The minimum number of tokens of a text is never too high, and high enough to be useful."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from kvscope_engine.tokenization.tokenizer import FastCodec, Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.text("ab \n\u2581e\u0301\u00e9\u00c5\u212b\u1100\u1161\uac00\U0001f600\u3000", max_size=200),
    st.lists(st.sampled_from(["    ", "abab", "<s>", "e\u0301", "\u2581\u2581", "1234", "\U0001f600"])).map("".join),
)


def byte_level(*normalizer: normalizers.Normalizer, **special: bool) -> FastCodec:
    """Return a codec like that of GPT-2, with tokens of several bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ab", "abab", "\u0120\u0120", "\u0120\u0120\u0120\u0120", "\u00c3\u00a9"]
    merges = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120"), ("\u00c3", "\u00a9")]
    backend = tokenizers.Tokenizer(models.BPE({word: n for n, word in enumerate([*letters, *words])}, merges))
    if normalizer:
        backend.normalizer = normalizers.Sequence(list(normalizer))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not special)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", **special)])
    return FastCodec(backend)


def sentence_pieces() -> FastCodec:
    """Return a codec like that of Llama 2: spaces written as U+2581, and bytes for unknown characters."""
    words = ["<unk>", *BYTES, *string.ascii_lowercase, "\u2581", "\u2581\u2581", "ab", "abab", "\u00e9"]
    merges = [("\u2581", "\u2581"), ("a", "b"), ("ab", "ab")]
    vocabulary = {word: n for n, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return FastCodec(backend)


KINDS: dict[str, Callable[[], FastCodec]] = {
    "byte level": byte_level,
    "byte level, composed": lambda: byte_level(normalizers.NFC()),
    "byte level, compatible forms": lambda: byte_level(normalizers.NFKC()),
    "byte level, stripped": lambda: byte_level(normalizers.Strip()),
    "byte level, a token that swallows spaces": lambda: byte_level(lstrip=True, rstrip=True),
    "sentence pieces": sentence_pieces,
}


@pytest.mark.parametrize("kind", KINDS)
def test_minimum_token_count_of_a_text_is_never_higher_than_the_real_count(kind: str) -> None:
    codec = KINDS[kind]()

    @given(TEXTS)
    def check(text: str) -> None:
        assert codec.fewest_tokens(text, 1 << 30) <= len(codec.encode(text, add_special_tokens=False))

    check()


def test_prompt_that_fits_is_never_refused_by_its_minimum_token_count(default_tokenizer: Tokenizer) -> None:
    @given(TEXTS)
    def check(text: str) -> None:
        default_tokenizer.refuse_too_long(text, len(default_tokenizer.encode(text)) + 1)

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "forms" not in kind and "stripped" not in kind])
def test_minimum_token_count_of_a_long_text_is_high_enough_to_refuse_it(kind: str) -> None:
    codec = KINDS[kind]()
    assert codec.fewest_tokens("\U0001f600" * 1000, 1 << 30) == 4000
    assert codec.fewest_tokens("x" * 3_000_000, 8192) >= 8192


def test_minimum_token_count_is_zero_if_the_tokenizer_may_shorten_text() -> None:
    for kind in ("byte level, compatible forms", "byte level, stripped"):
        assert KINDS[kind]().fewest_tokens("x" * 1000, 10) == 0
