"""Pre-tokenizers of GGUF byte-level vocabularies: how text is split before merges, by the field `tokenizer.ggml.pre`.

transformers' loader supports some of the values and silently splits like GPT-2 for all others. Here further values are
supported, and an unknown one is refused by name, because it would change the tokens.

The values are those of llama.cpp (`src/llama-vocab.cpp`); the patterns are those of the models' own tokenizers.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader
from kvscope_telemetry.errors import BadInput

_KEY: Final = "tokenizer.ggml.pre"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LIKE_GPT2: Final = (_GPT2,)
_SINGLE_DIGITS: Final = (r"\p{N}", _GPT2)
_BLOOM: Final = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEFAULT: Final = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": _DEFAULT,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "bloom": (_BLOOM,),
    "gpt3-finnish": (_BLOOM,),
    "poro-chat": (_BLOOM,),
    "viking": (_BLOOM, r"\p{N}"),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "exaone4"), _LIKE_GPT2
    ),
}
"""Split patterns by value of `tokenizer.ggml.pre`, applied in sequence, each to the pieces of the previous one."""
_ALIASES: Final = {
    "stablelm2": "qwen2",
    "hunyuan": "qwen2",
    "solar-open": "qwen2",
    "grok-2": "qwen2",
    "glm4": "llama-bpe",
    "chatglm-bpe": "llama-bpe",
}
"""Values of `tokenizer.ggml.pre` that transformers does not support, each with a supported value that splits
text by the same pattern.
"""
_IGNORING_MERGES: Final = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
"""Values of `tokenizer.ggml.pre` for which a word that is a token becomes that token even if merges do not lead
to it.
"""


def check_pre_tokenizer(header: GgufHeader) -> None:
    """Raise BadInput, naming the accepted values, if the pre-tokenizer of the file is unknown."""
    name = _name(header)
    if name is not None and not _patterns(name):
        raise BadInput(f"{_KEY}={name!r:.60} is not accepted: {', '.join(sorted(_accepted()))}")


def apply_pre_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    from tokenizers import Regex, pre_tokenizers

    name = _name(header)
    if name is None:
        return
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _patterns(name)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.backend_tokenizer.model.ignore_merges = name in _IGNORING_MERGES


def _name(header: GgufHeader) -> str | None:
    """Return the value of `tokenizer.ggml.pre`, or llama.cpp's default; None if the vocabulary is not byte-level."""
    if header.fields.get("tokenizer.ggml.model") != "gpt2":
        return None
    return str(header.fields.get(_KEY, "") or "default")


def _patterns(name: str) -> tuple[str, ...]:
    pattern = _known_to_transformers().get(_ALIASES.get(name, name))
    return SPLITS.get(name, () if pattern is None else (pattern,))


def _accepted() -> set[str]:
    return SPLITS.keys() | _ALIASES.keys() | _known_to_transformers().keys()


def _known_to_transformers() -> dict[str, str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return dict(GGUF_PRE_TOKENIZER_SPLITS)
