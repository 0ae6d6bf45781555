"""Interface to the attention of other libraries: whether a library supports a shape, and prefill over our blocks."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.host_lengths import HostLengths

Value = TypeVar("Value")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class AttentionShape(NamedTuple):
    """Heads and dtype of a model's attention, the block size, and the compute capability of its device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    capability: int
    """Compute capability, 90 for 9.0."""


class Prefill(NamedTuple):
    """Prefill of one layer that uses only features that the libraries support. The lengths of the step are
    known on the host.
    """

    args: AttentionArgs
    runs: QueryRuns
    lengths: HostLengths

    @property
    def window_left(self) -> int:
        """Number of tokens before its own that a query attends to; -1 for no limit."""
        return -1 if self.args.sliding_window is None else self.args.sliding_window - 1


class Library(Protocol):
    name: str

    def refusal(self, shape: AttentionShape) -> str:
        """Return a short text saying why the library does not support a shape, or "" if it does."""
        ...

    def prefill(self, batch: Prefill) -> Tensor:
        """Compute attention, (num_tokens, num_heads, head_dim), written to `args.out` if given. Raises the
        library's errors.
        """
        ...


class LibraryMissing(Exception):
    """Raised if a library cannot be used. The message is a short reason."""


def import_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library compiled for another torch may raise any error
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        why = " ".join(str(error).split())[:120]
        raise LibraryMissing("not installed" if is_absent else f"cannot be imported: {why}") from None


def name_with_version(name: str, distribution: str) -> str:
    """Return the name followed by the version of the distribution, or only the name if it is not installed."""
    try:
        return f"{name} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return name


class OncePerStep(Generic[Value]):
    """Cache of values that all layers of a step share.

    A step is identified by a tensor, which the cache references so that its identity stays unique.
    """

    def __init__(self) -> None:
        self._step: Tensor | None = None
        self._values: dict[object, Value] = {}

    def get(self, step: Tensor, key: object, make: Callable[[], Value]) -> Value:
        """Return the value for `key` in the step of this tensor, created by `make` on first use."""
        if step is not self._step:
            self._values.clear()
            self._step = step
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]
