"""Finds the files of models on the Hugging Face hub in the local cache, and downloads them if necessary."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvscope_engine.model.loader.download.progress import Meter, ProgressCallback
from kvscope_telemetry.errors import BadInput, KvscopeError

PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Patterns of files to download: safetensors, configuration and tokenizer, but no file that would be unpickled or
executed.
"""
TOKENIZER_PATTERNS: Final = tuple(pattern for pattern in PATTERNS if pattern != "*.safetensors")

POLL_S: Final = 0.1


def hub_folder(repository: str, progress: ProgressCallback) -> Path:
    """Return the folder with the files of `repository`, downloading them if necessary.

    Raises:
        BadInput: The model does not exist, or the user has no access.
        KvscopeError: The hub cannot be reached and the files are not local, or the disk is full.
    """
    from huggingface_hub import snapshot_download

    bars: list[Any] = []
    fetch = partial(snapshot_download, repository, allow_patterns=list(PATTERNS), tqdm_class=_counting_bar(bars))
    with _naming_model(repository), Meter(progress, "download", repository, unit="bytes") as meter:
        download = _run_on_daemon_thread(fetch)
        try:
            # The bars count in the hub's own threads; progress is reported from this one.
            while not wait((download,), POLL_S).done:
                meter.reach(*_progress_of(bars))
        except BaseException:  # e.g. KeyboardInterrupt
            _delete_partial_downloads()
            raise
        folder = download.result()
        meter.reach(*_progress_of(bars))
    return Path(folder)


def hub_tokenizer_folder(repository: str) -> Path:
    """Return the folder with the tokenizer and the configuration of `repository`, downloading them if necessary, but
    not the weights. Raises errors like `hub_folder`.
    """
    from huggingface_hub import snapshot_download

    with _naming_model(repository):
        return Path(snapshot_download(repository, allow_patterns=list(TOKENIZER_PATTERNS)))


def hub_file(repository: str, name: str) -> Path:
    """Return the path of the file `name` of `repository`, downloading it if necessary.

    Raises:
        BadInput: The model or the file does not exist, or the user has no access.
        KvscopeError: The hub cannot be reached and the file is not local, or the disk is full.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with _naming_model(repository):
        try:
            return Path(hf_hub_download(repository, name))
        except EntryNotFoundError as error:
            if isinstance(error, FileNotFoundError):  # not local, and the hub could not be reached
                raise
            raise BadInput(f"model {repository!r} is not accepted: it has no {name}") from error


def _run_on_daemon_thread(fetch: Callable[[], str]) -> Future[str]:
    """Run `fetch` on a daemon thread, so that a stopped process exits without waiting for it."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(fetch())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvscope-download", daemon=True).start()
    return future


def _delete_partial_downloads() -> None:
    """Delete the incomplete files that this process has open in the hub's cache, because the hub does not resume
    them."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).resolve()
    with suppress(FileNotFoundError):  # without /proc an unfinished file stays until the next download
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                file = descriptor.readlink()
                if file.suffix == ".incomplete" and file.is_relative_to(cache):
                    file.unlink()


@contextmanager
def _naming_model(repository: str) -> Iterator[None]:
    """Return a context that converts errors of the hub to one line that names the model."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model, log_in = f"model {repository!r}", "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except KvscopeError:
        raise
    except GatedRepoError as error:
        url = f"{constants.ENDPOINT}/{repository}"
        raise BadInput(f"{model} is gated: accept its licence at {url}, and {log_in}") from error
    except RepositoryNotFoundError as error:
        raise BadInput(
            f"{model} not found: no such folder, and no such id on the Hugging Face hub; if it is private, {log_in}"
        ) from error
    except RevisionNotFoundError as error:
        raise BadInput(f"{model} is not accepted: it is empty on the Hugging Face hub") from error
    except LocalEntryNotFoundError as error:
        reason = f"the Hugging Face hub cannot be reached ({_line(error.__cause__ or error)})"
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE prevents downloads from the Hugging Face hub"
        raise KvscopeError(f"{model} is not on this machine, and {reason}") from error
    except Exception as error:  # a file system error, or one of several HTTP client libraries'
        if isinstance(error, OSError) and error.strerror:
            raise KvscopeError(
                f"{model} cannot be kept in {constants.HF_HUB_CACHE!r}: {error.strerror}; free space on this disk, "
                "fix the folder's permissions, or set HF_HOME to another folder"
            ) from error
        raise KvscopeError(f"{model} cannot be downloaded: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.200}"


def _counting_bar(bars: list[Any]) -> type[Any]:
    """Return a tqdm class that draws nothing. Instances that count bytes are appended to `bars`."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": False, "file": io.StringIO()})
            if options.get("unit") == "B":
                bars.append(self)

        def display(self, *_: Any, **__: Any) -> bool:
            return True

    return Bar


def _progress_of(bars: list[Any]) -> tuple[int, int]:
    """Return the bytes done and the total bytes. The hub counts received and written bytes in separate bars."""
    done = max((int(bar.n) for bar in bars), default=0)
    return done, max((int(bar.total or 0) for bar in bars), default=0)
