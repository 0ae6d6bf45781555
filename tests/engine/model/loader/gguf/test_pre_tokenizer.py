"""Text is split as the file's `tokenizer.ggml.pre` says, and an unknown value is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from kvscope_engine.model.loader.gguf.gguf_cache import convert_gguf
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader
from kvscope_engine.model.loader.gguf.pre_tokenizer import apply_pre_tokenizer, check_pre_tokenizer
from kvscope_telemetry.errors import BadInput

TEXT = "In 2024, it's 3.14!\n\tx += 100"
SPLITS = {
    "gpt-2": ["In", " 2024", ",", " it", "'s", " 3", ".", "14", "!", "\n", "\t", "x", " +=", " 100"],
    "smollm": ["In", " ", *"2024", ",", " it", "'s", " ", "3", ".", *"14", "!", "\n", "\t", "x", " +=", " ", *"100"],
    "qwen2": ["In", " ", *"2024", ",", " it", "'s", " ", "3", ".", *"14", "!\n", "\tx", " +=", " ", *"100"],
    "llama-bpe": ["In", " ", "202", "4", ",", " it", "'s", " ", "3", ".", "14", "!\n", "\tx", " +=", " ", "100"],
    "falcon": [
        "In",
        " ",
        "202",
        "4",
        ",",
        " it",
        "'",
        "s",
        " 3",
        ".",
        "14",
        "!",
        "\n",
        "\t",
        "x",
        " ",
        "+=",
        " ",
        "100",
    ],
    "deepseek-coder": [
        "In",
        " ",
        *"2024",
        ",",
        " it",
        "'",
        "s",
        " ",
        "3",
        ".",
        *"14",
        "!",
        "\n",
        "\tx",
        " += ",
        *"100",
    ],
    "default": [
        "In",
        " ",
        "202",
        "4",
        ",",
        " it",
        "'",
        "s",
        " ",
        "3",
        ".",
        "14",
        "!",
        "\n",
        "\t",
        "x",
        " ",
        "+=",
        " ",
        "100",
    ],
}
"""Expected splits. The first four equal those of the tokenizers of GPT-2, SmolLM2, Qwen2 and Llama 3."""
ALIASES = {"starcoder": "smollm", "command-r": "smollm", "glm4": "llama-bpe", "stablelm2": "qwen2", "": "default"}


class FakeTokenizer:
    """Object with the backend tokenizer of transformers' tokenizers."""

    def __init__(self) -> None:
        self.backend_tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, []))


def header(pre: str, model: str = "gpt2") -> GgufHeader:
    return GgufHeader({"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre})


@pytest.mark.parametrize("name", [*SPLITS, *ALIASES])
def test_known_vocabularies_split_text_as_their_tokenizers(name: str) -> None:
    check_pre_tokenizer(header(name))
    source = FakeTokenizer()
    apply_pre_tokenizer(source, header(name))
    pieces = source.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)  # type: ignore[union-attr]
    assert [TEXT[start:end] for _, (start, end) in pieces] == SPLITS[ALIASES.get(name, name)]


@pytest.mark.parametrize(("name", "ids"), [("llama-bpe", [2]), ("gpt-2", [0, 1])])
def test_words_without_merges_are_tokens_only_where_the_vocabulary_says_so(name: str, ids: list[int]) -> None:
    source = FakeTokenizer()
    apply_pre_tokenizer(source, header(name))
    assert source.backend_tokenizer.encode("ab").ids == ids


def test_smollm_pre_tokenizer_of_a_gguf_file_splits_text_like_smollm2() -> None:
    source = FakeTokenizer()
    apply_pre_tokenizer(source, header("smollm"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    smollm2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    for text in (TEXT, "  a 12\u0663\u00b2 don't\n\n 9", "x1y 22  "):
        found = source.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
        assert found == smollm2.pre_tokenize_str(text)


def test_unknown_pre_tokenizer_is_refused_with_the_accepted_ones(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"tokenizer.ggml.pre='nonsense' is not accepted: .*llama-bpe.*smollm"):
        convert_gguf(tiny_gguf(pre="nonsense"), torch.float32, tmp_path / "converted", lambda progress: None)
    check_pre_tokenizer(header("nonsense", "llama"))  # other vocabulary types have no such field
