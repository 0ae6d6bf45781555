"""Loads a model's tokenizer from its folder, and saves it in a form that loads without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvscope_engine.json_file import read_json
from kvscope_engine.tokenization.tokenizer import FastCodec, PythonCodec, Tokenizer
from kvscope_telemetry.errors import BadInput

TOKENIZER_FILE: Final = "tokenizer.json"
EXTRAS_FILE: Final = "kvscope_tokenizer.json"
"""File with the special tokens by role and the chat template, stored in the same folder as a complete
`tokenizer.json`.
"""
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"
"""File in which older vision models store the chat template, instead of in the tokenizer's configuration."""
_ANY_OF: Final = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer in `folder`; None if there is none. Raises BadInput if it cannot be read."""
    if (folder / EXTRAS_FILE).is_file():
        extras = json.loads((folder / EXTRAS_FILE).read_bytes())
        codec = FastCodec.from_file(folder / TOKENIZER_FILE)
        return Tokenizer(codec, extras["special_tokens"], extras["chat_template"])
    if not any((folder / name).is_file() for name in _ANY_OF):
        return None
    from transformers import AutoTokenizer

    try:
        source = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises nearly any exception for an invalid file
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the tokenizer in {str(folder)!r} cannot be read: {line:.200}") from error
    if source.chat_template is None and (folder / PROCESSOR_TEMPLATE_FILE).is_file():
        source.chat_template = read_json(folder / PROCESSOR_TEMPLATE_FILE).get("chat_template")
    return from_transformers(source)


def from_transformers(source: Any) -> Tokenizer:
    """Convert a tokenizer of transformers. If it has several chat templates, the one named "default" is used."""
    codec = FastCodec(source.backend_tokenizer) if source.is_fast else PythonCodec(source)
    template = source.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return Tokenizer(codec, source.special_tokens_map, template)


def save_tokenizer(source: Any, folder: Path) -> None:
    """Save a transformers tokenizer to `folder`, so that `load_tokenizer` does not have to import transformers.

    A slow (Python) tokenizer is saved in its own format, and still needs transformers.
    """
    source.save_pretrained(folder)
    if not source.is_fast:
        return
    extras = {"special_tokens": dict(source.special_tokens_map), "chat_template": source.chat_template}
    (folder / EXTRAS_FILE).write_text(json.dumps(extras, ensure_ascii=False), encoding="utf-8")
