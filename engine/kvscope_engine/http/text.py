"""The model's text side in this process: its tokenizer, found by the model's name, and work on it beside the loop.

Without a tokenizer here the engine makes the tokens itself, and what needs text of tokens says that it has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from kvscope_engine.http.shapes.errors import ApiError
from kvscope_engine.model.fetching.cache_folder import cache_folder
from kvscope_engine.model.fetching.checksum import remembered_sha256
from kvscope_engine.model.fetching.default_model import DEFAULT_GGUF_SHA256
from kvscope_engine.model.fetching.names import parse_model_name
from kvscope_engine.model.gguf.entries import entry_of
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_engine.model.text.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import ModelInfo

NUM_THREADS: Final = 2
MAX_WAITING: Final = 256
"""Pieces of work on text at a time; more are too many requests."""
_Result = TypeVar("_Result")


class TextSide:
    """The tokenizer of whichever model the engine has, or of `folder`; `run` does work on it in threads."""

    def __init__(self, folder: Path | None = None) -> None:
        self.reason = ""
        """Why there is no tokenizer; empty where there is one, or none is needed."""
        self._folder = folder
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kvscope-text")
        self._num_waiting = 0
        self._model: ModelInfo | None = None
        self._loading: asyncio.Task[Tokenizer | None] | None = None

    async def tokenizer(self, model: ModelInfo) -> Tokenizer | None:
        """Of this model; loaded once."""
        if self._loading is None or self._model != model:
            self._model = model
            self._loading = asyncio.create_task(self.run(lambda: self._load(model)))
        return await asyncio.shield(self._loading)

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """What `work` gives, done in a thread. BadInput becomes a client's error."""
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(429, f"{MAX_WAITING} prompts are being made into tokens already", code="server_busy")
        self._num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(lambda _: self._done())
        try:
            return await future
        except BadInput as error:
            raise ApiError(400, str(error)) from error

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self) -> None:
        self._num_waiting -= 1

    def _load(self, model: ModelInfo) -> Tokenizer | None:
        self.reason = ""
        try:
            folder = self._folder or tokenizer_folder(model)
            found = load_tokenizer(folder)
        except (KvscopeError, OSError, ValueError) as error:
            self.reason = f"the tokenizer of model {model.name!r} is not on this machine: {error}"
            return None
        if found is None:
            self.reason = f"model {model.name!r} has no tokenizer"
        return found


def tokenizer_folder(model: ModelInfo) -> Path:
    """Where the files of a model of this name lie on this machine. Raises BadInput and KvscopeError."""
    name = parse_model_name(model.name)
    if name.kind == "hub":
        return _hub_folder(name.text)
    if name.kind == "default":
        return entry_of(DEFAULT_GGUF_SHA256, model.dtype)
    if name.kind == "gguf":
        return entry_of(remembered_sha256(name.path, cache_folder() / "stamps"), model.dtype)
    return name.path.parent if name.kind == "dummy" else name.path


def _hub_folder(repository: str) -> Path:
    """What the engine downloaded; nothing is downloaded here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise KvscopeError(f"{repository!r} is not in the hub's cache") from error
