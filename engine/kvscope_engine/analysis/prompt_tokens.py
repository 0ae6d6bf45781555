"""Token ids of the prompts of a request file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvscope_engine.analysis.prompt_formats import FilePrompt
from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF_SHA256
from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_engine.model.loader.download.progress import ProgressCallback
from kvscope_engine.model.loader.gguf.gguf_entries import content_sha256, entry_of, is_intact
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_engine.tokenization.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput

_DTYPES: Final = ("bfloat16", "float32", "float16")


class PromptEncoder:
    """Encodes prompts as an engine would: conversations with the model's chat template, texts with special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_ids(self, prompt: FilePrompt) -> list[int]:
        """Return the token ids. Raises BadInput for text that is not valid or that the chat template refuses."""
        if prompt.token_ids:
            return list(prompt.token_ids)
        if not prompt.messages:
            return self._tokenizer.encode(prompt.text)
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode("\n".join(f"{each['role']}: {each['content']}" for each in prompt.messages))
        return self._tokenizer.chat(prompt.messages)

    def text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)


def model_tokenizer(model: str, progress: ProgressCallback) -> Tokenizer:
    """Load the tokenizer of a model, and download or convert the model's files if that is needed.

    Raises BadInput for a model that does not exist or has no tokenizer.
    """
    tokenizer = load_tokenizer(_folder(model, progress))
    if tokenizer is None:
        raise BadInput(f"model {model!r} has no tokenizer: give another --model")
    return tokenizer


def _folder(model: str, progress: ProgressCallback) -> Path:
    name = parse_model_name(model)
    if name.kind == "hub":
        from kvscope_engine.model.loader.download.hub import hub_tokenizer_folder

        return hub_tokenizer_folder(name.text)
    if name.kind in ("folder", "dummy"):
        return name.path if name.kind == "folder" else name.path.parent
    sha256 = DEFAULT_GGUF_SHA256 if name.kind == "default" else content_sha256(name.path)
    for dtype in _DTYPES:
        if is_intact(entry_of(sha256, dtype)):
            return entry_of(sha256, dtype)
    return _converted(None if name.kind == "default" else name.path, progress)


def _converted(gguf: Path | None, progress: ProgressCallback) -> Path:
    import torch

    from kvscope_engine.model.loader.download.default_model import default_gguf
    from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf

    return converted_gguf(default_gguf(progress) if gguf is None else gguf, torch.bfloat16, progress)
