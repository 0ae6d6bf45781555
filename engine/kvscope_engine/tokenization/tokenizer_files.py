"""Reading a model's tokenizer from its folder, and writing it so that the next start reads it fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvscope_engine.json_file import read_json
from kvscope_engine.tokenization.tokenizer import FastCodec, PythonCodec, Tokenizer
from kvscope_telemetry.errors import BadInput

TOKENIZER_FILE: Final = "tokenizer.json"
EXTRAS_FILE: Final = "kvscope_tokenizer.json"
"""Beside a `tokenizer.json` that is exact: special tokens by role, and the chat template."""
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"
"""Of older models that see: the template is that of all their inputs."""
_ANY_OF: Final = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `folder`, None when it holds none. Raises BadInput when it cannot be read."""
    if (folder / EXTRAS_FILE).is_file():
        extras = json.loads((folder / EXTRAS_FILE).read_bytes())
        codec = FastCodec.from_file(folder / TOKENIZER_FILE)
        return Tokenizer(codec, extras["special_tokens"], extras["chat_template"])
    if not any((folder / name).is_file() for name in _ANY_OF):
        return None
    from transformers import AutoTokenizer

    try:
        source = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a external file: transformers raises nearly anything
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the tokenizer in {str(folder)!r} cannot be read: {line:.200}") from error
    if source.chat_template is None and (folder / PROCESSOR_TEMPLATE_FILE).is_file():
        source.chat_template = read_json(folder / PROCESSOR_TEMPLATE_FILE).get("chat_template")
    return from_transformers(source)


def from_transformers(source: Any) -> Tokenizer:
    """Ours, for one of transformers' tokenizers."""
    codec = FastCodec(source.backend_tokenizer) if source.is_fast else PythonCodec(source)
    template = source.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return Tokenizer(codec, source.special_tokens_map, template)


def save_tokenizer(source: Any, folder: Path) -> None:
    """Write transformers' tokenizer into `folder`, so that `load_tokenizer` needs no transformers for it."""
    source.save_pretrained(folder)
    if not source.is_fast:
        return
    extras = {"special_tokens": dict(source.special_tokens_map), "chat_template": source.chat_template}
    (folder / EXTRAS_FILE).write_text(json.dumps(extras, ensure_ascii=False), encoding="utf-8")
