"""Determines the end tokens of a GGUF model: those named in the file's header, and control tokens recognized by their
text.

The rules are those of llama.cpp. A file names the end of a text (`eos`), of a turn (`eot`) and of a message (`eom`).
Older files name only `eos`, which chat models never generate, so the other tokens are recognized by their text.
"""

from __future__ import annotations

from typing import Any, Final

from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader

_KEYS: Final = ("eos", "eot", "eom")
_TEXTS: Final = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
)
_HARMONY: Final = frozenset(("<|return|>", "<|call|>"))
"""End tokens of the Harmony format. If a model has them, `<|end|>` ends a message within an answer, not the answer."""


def end_token_ids(header: GgufHeader, tokenizer: Any) -> list[int]:
    """Return the ids of the end tokens, ascending. `tokenizer` is the one that transformers creates from the file."""
    ids_in_header = {header.fields.get(f"tokenizer.ggml.{key}_token_id") for key in _KEYS}
    special = set(tokenizer.all_special_tokens)
    special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = _TEXTS & special
    if texts >= _HARMONY:
        texts -= {"<|end|>"}
        ids_in_header.discard(tokenizer.convert_tokens_to_ids("<|end|>"))
    ids = {token for token in ids_in_header if isinstance(token, int)} | set(
        tokenizer.convert_tokens_to_ids(sorted(texts))
    )
    # transformers adds tokens that the file does not have, such as GPT-2's own.
    return sorted(token for token in ids if 0 <= token < header.shapes["token_embd.weight"][-1])
