"""Models of the Hugging Face hub, by id: their files on this machine, downloaded when they are not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvscope_engine.model.fetching.progress import Meter, ProgressCallback
from kvscope_telemetry.errors import BadInput, KvscopeError

PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Weights in safetensors, configuration, tokenizer; nothing that would have to be unpickled or run."""

POLL_S: Final = 0.1


def hub_folder(repository: str, progress: ProgressCallback) -> Path:
    """Folder with the files of `repository`.

    Raises BadInput when there is no such model or it is not open to this user, KvscopeError when the hub cannot
    be reached and the files are not here already.
    """
    from huggingface_hub import snapshot_download

    bars: list[Any] = []
    with (
        _named_errors(repository),
        Meter(progress, "download", repository, unit="bytes") as meter,
        ThreadPoolExecutor(1) as worker,
    ):
        download = worker.submit(
            snapshot_download, repository, allow_patterns=list(PATTERNS), tqdm_class=_counting_bar(bars)
        )
        # The bars count in the hub's own threads; what is told is told from this one.
        while not wait((download,), POLL_S).done:
            meter.reach(*_furthest(bars))
        folder = download.result()
        meter.reach(*_furthest(bars))
    return Path(folder)


def hub_file(repository: str, name: str) -> Path:
    """The file `name` of `repository` alone. Raises as `hub_folder`, and BadInput where there is no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with _named_errors(repository):
        try:
            return Path(hf_hub_download(repository, name))
        except EntryNotFoundError as error:
            if isinstance(error, FileNotFoundError):  # not here, and nobody could be asked
                raise
            raise BadInput(f"model {repository!r} is not accepted: it has no {name}") from error


@contextmanager
def _named_errors(repository: str) -> Iterator[None]:
    """What the hub raises becomes one line that names the model."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise BadInput(f"model {repository!r} is gated: accept its licence on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise BadInput(
            f"model {repository!r} not found: no such folder, and no such id on the Hugging Face hub"
        ) from error
    except LocalEntryNotFoundError as error:
        raise KvscopeError(
            f"model {repository!r} is not on this machine, and the Hugging Face hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise KvscopeError(f"model {repository!r} cannot be downloaded: {line:.200}") from error


def _counting_bar(bars: list[Any]) -> type[Any]:
    """A kind of bar that draws nothing; those made for bytes come into `bars`."""
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


def _furthest(bars: list[Any]) -> tuple[int, int]:
    """Bytes done and in all: the hub counts those received and those written apart."""
    done = max((int(bar.n) for bar in bars), default=0)
    return done, max((int(bar.total or 0) for bar in bars), default=0)
