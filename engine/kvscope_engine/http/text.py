"""The model's text side in this process: its tokenizer, found by the model's name, and work on it beside the loop.

Work on text cannot be interrupted, so it comes in pieces: a prompt, or small ones of a request together. Clients take
turns with them, and a client's requests; of two threads one takes small pieces alone, which never wait behind a book.
How many pieces wait is bounded by the requests that are answered at a time, and their bytes by those of bodies.
Without a tokenizer here the engine makes the tokens itself, and what needs text of tokens says that it has none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from kvscope_engine.http.shapes.errors import refused
from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF_SHA256
from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_engine.model.loader.gguf.gguf_entries import content_sha256, entry_of
from kvscope_engine.server.turns import Turns
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_engine.tokenization.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import ModelInfo

SMALL_BYTES: Final = 64 << 10
"""Of text that takes milliseconds."""
_Result = TypeVar("_Result")


class Asker(NamedTuple):
    """Whose work it is: a client, and which of its requests."""

    client: str = ""
    batch: str = ""


@dataclass(eq=False, slots=True)
class _Piece:
    work: Callable[[], Any]
    is_small: bool
    done: Future[Any] = field(default_factory=Future)


class TextSide:
    """The tokenizer of whichever model the engine has, or of `folder`; `run` does work on it in threads."""

    def __init__(self, folder: Path | None = None) -> None:
        self.reason = ""
        """Why there is no tokenizer; empty where there is one, or none is needed."""
        self._folder = folder
        self._turns: Turns[_Piece] = Turns()
        self._changed = threading.Condition()
        self._is_closed = False
        for kind in ("any", "small"):
            threading.Thread(target=self._serve, args=(kind == "small",), name="kvscope-text", daemon=True).start()
        self._model: ModelInfo | None = None
        self._loading: asyncio.Task[Tokenizer | None] | None = None

    async def tokenizer(self, model: ModelInfo) -> Tokenizer | None:
        """Of this model; loaded once."""
        if self._loading is None or self._model != model:
            self._model = model
            self._loading = asyncio.create_task(self.run(Asker(), 0, lambda: self._load(model)))
        return await asyncio.shield(self._loading)

    async def run(self, asker: Asker, num_bytes: int, work: Callable[[], _Result]) -> _Result:
        """What `work`, on that much text, gives, done in a thread in its turn. BadInput becomes a client's error."""
        piece = _Piece(work, num_bytes <= SMALL_BYTES)
        with self._changed:
            self._turns.put(*asker, piece)
            self._changed.notify_all()
        try:
            result: _Result = await asyncio.wrap_future(piece.done)
            return result
        except BadInput as error:
            raise refused(str(error)) from error
        except asyncio.CancelledError:
            with self._changed:
                self._turns.take_if(lambda other: other is piece)  # its text goes with its client
            raise

    def close(self) -> None:
        """End the threads; work that has not begun is dropped, and what is being done serves nobody."""
        with self._changed:
            self._is_closed = True
            for piece in self._turns.take_if(lambda piece: True):
                piece.done.cancel()
            self._changed.notify_all()

    def _serve(self, small_alone: bool) -> None:
        while (piece := self._next(small_alone)) is not None:
            if piece.done.set_running_or_notify_cancel():
                try:
                    result = piece.work()
                except Exception as error:  # told to who asked
                    piece.done.set_exception(error)
                else:
                    piece.done.set_result(result)
                    del result
            del piece  # with its text, while the next is waited for

    def _next(self, small_alone: bool) -> _Piece | None:
        with self._changed:
            while not self._is_closed:
                found = self._turns.pop(lambda client, piece: piece.is_small or not small_alone)
                if found is not None:
                    return found[1]
                self._changed.wait()
            return None

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
        return entry_of(content_sha256(name.path), model.dtype)
    return name.path.parent if name.kind == "dummy" else name.path


def _hub_folder(repository: str) -> Path:
    """What the engine downloaded; nothing is downloaded here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise KvscopeError(f"{repository!r} is not in the Hugging Face cache") from error
