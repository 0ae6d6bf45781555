"""Suppresses transformers' log messages and progress bars. The bars are converted to kvscope's progress reports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging import ERROR
from typing import Any
from unittest.mock import patch

from transformers.utils import logging

from kvscope_engine.model.loader.download.progress import Meter, ProgressCallback

BarHook = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def quiet_transformers(callback: ProgressCallback, stage: str, detail: str, unit: str = "tensors") -> Iterator[None]:
    """Return a context in which only errors are logged, and each bar is reported as progress of `stage`."""
    verbosity = logging.get_verbosity()
    hook = logging.set_tqdm_hook(_bar_hook(callback, stage, detail, unit))
    logging.set_verbosity(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(verbosity)


@contextmanager
def quiet_gguf(callback: ProgressCallback, detail: str) -> Iterator[None]:
    """Return the context of `quiet_transformers` for the GGUF loader, which has a separate progress bar."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader

    with ExitStack() as stack:
        stack.enter_context(quiet_transformers(callback, "convert", detail))

        def bar(tensors: list[Any], **_: Any) -> _Bar:
            return _Bar(tensors, Meter(callback, "convert", detail, len(tensors), "tensors"))

        stack.enter_context(patch.object(gguf_loader, "tqdm", bar))
        yield


def quiet_kernel_advice() -> None:
    """Stop transformers from recommending GPU kernels that a CPU cannot run."""
    logging.get_logger("transformers.integrations.hub_kernels").setLevel(ERROR)


class _Bar:
    """Stub with the methods of tqdm that transformers uses. Reports progress to a callback."""

    def __init__(self, items: Any, meter: Meter) -> None:
        self._items, self._meter = items, meter

    def __iter__(self) -> Iterator[Any]:
        with self._meter:
            for item in self._items:
                yield item
                self._meter.advance()

    def __enter__(self) -> _Bar:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)

    def update(self, count: int = 1) -> None:
        self._meter.advance(count)

    def close(self) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignore


def _ignore(*_: Any, **__: Any) -> None: ...


def _bar_hook(callback: ProgressCallback, stage: str, detail: str, unit: str) -> BarHook:
    def hook(_factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> _Bar:
        items = args[0] if args else options.get("iterable", ())
        total = options.get("total") or (len(items) if hasattr(items, "__len__") else 0)
        return _Bar(items, Meter(callback, stage, detail, total, unit))

    return hook
