"""The model's tokenizer in this process, located by the model's name, and threads for work on text.

Work on text cannot be interrupted, so it is done in pieces: one prompt, or several small prompts of a request. Clients
are served round-robin, and requests round-robin within a client. One of the two threads does only small pieces, which
therefore never wait behind a very long text. The number of waiting pieces is bounded by the limit on requests, and
their bytes by the limit on bodies. If there is no tokenizer in this process, the engine tokenizes, and endpoints that
need the text of tokens refuse with the reason.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from kvscope_engine.http.schemas.api_errors import refusal_error
from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF_SHA256
from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_engine.model.loader.gguf.gguf_entries import content_sha256, entry_of
from kvscope_engine.server.fair_queue import FairQueue
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_engine.tokenization.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import ModelInfo

SMALL_BYTES: Final = 64 << 10
"""Maximum bytes of a small piece of text, which is tokenized within milliseconds."""
_Result = TypeVar("_Result")


class WorkOwner(NamedTuple):
    """Fair-queue key of work: a client, and one of its requests."""

    client: str = ""
    batch: str = ""


@dataclass(eq=False, slots=True)
class _WorkItem:
    work: Callable[[], Any]
    is_small: bool
    done: Future[Any] = field(default_factory=Future)


class TokenizerThreads:
    """Tokenizer of the engine's current model, or of `folder`, and two threads for work on text."""

    def __init__(self, folder: Path | None = None) -> None:
        self.reason = ""
        """Why there is no tokenizer; empty if there is one, or if none was needed yet."""
        self._folder = folder
        self._queue: FairQueue[_WorkItem] = FairQueue()
        self._changed = threading.Condition()
        self._is_closed = False
        for kind in ("any", "small"):
            threading.Thread(target=self._serve, args=(kind == "small",), name="kvscope-text", daemon=True).start()
        self._model: ModelInfo | None = None
        self._loading: asyncio.Task[Tokenizer | None] | None = None

    async def tokenizer(self, model: ModelInfo) -> Tokenizer | None:
        """Return the model's tokenizer, loaded once; None, with `reason` set, if it cannot be loaded."""
        if self._loading is None or self._model != model:
            self._model = model
            self._loading = asyncio.create_task(self.run(WorkOwner(), 0, lambda: self._load(model)))
        return await asyncio.shield(self._loading)

    async def run(self, owner: WorkOwner, num_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Run `work`, which processes `num_bytes` of text, on a thread when the owner's turn comes, and return its
        result.

        BadInput is converted to an ApiError for the client.
        """
        item = _WorkItem(work, num_bytes <= SMALL_BYTES)
        with self._changed:
            self._queue.append(*owner, item)
            self._changed.notify_all()
        try:
            result: _Result = await asyncio.wrap_future(item.done)
            return result
        except BadInput as error:
            raise refusal_error(str(error)) from error
        except asyncio.CancelledError:
            with self._changed:
                self._queue.remove_if(lambda other: other is item)  # frees the text of a disconnected client
            raise

    def close(self) -> None:
        """End the threads. Queued work is dropped; work in progress is abandoned."""
        with self._changed:
            self._is_closed = True
            for item in self._queue.remove_if(lambda item: True):
                item.done.cancel()
            self._changed.notify_all()

    def _serve(self, small_only: bool) -> None:
        while (item := self._next(small_only)) is not None:
            if item.done.set_running_or_notify_cancel():
                try:
                    result = item.work()
                except Exception as error:  # re-raised to the caller of `run`
                    item.done.set_exception(error)
                else:
                    item.done.set_result(result)
                    del result
            del item  # frees its text while waiting for the next

    def _next(self, small_only: bool) -> _WorkItem | None:
        with self._changed:
            while not self._is_closed:
                popped = self._queue.pop(lambda client, item: item.is_small or not small_only)
                if popped is not None:
                    return popped[1]
                self._changed.wait()
            return None

    def _load(self, model: ModelInfo) -> Tokenizer | None:
        self.reason = ""
        try:
            folder = self._folder or tokenizer_folder(model)
            tokenizer = load_tokenizer(folder)
        except (KvscopeError, OSError, ValueError) as error:
            self.reason = f"the tokenizer of model {model.name!r} is not on this machine: {error}"
            return None
        if tokenizer is None:
            self.reason = f"model {model.name!r} has no tokenizer"
        return tokenizer


def tokenizer_folder(model: ModelInfo) -> Path:
    name = parse_model_name(model.name)
    if name.kind == "hub":
        return _hub_folder(name.text)
    if name.kind == "default":
        return entry_of(DEFAULT_GGUF_SHA256, model.dtype)
    if name.kind == "gguf":
        return entry_of(content_sha256(name.path), model.dtype)
    return name.path.parent if name.kind == "dummy" else name.path


def _hub_folder(repository: str) -> Path:
    """Return the folder in the Hugging Face cache to which the engine downloaded the model. Downloads nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise KvscopeError(f"{repository!r} is not in the Hugging Face cache") from error
