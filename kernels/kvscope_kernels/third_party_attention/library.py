"""The interface of another library's attention: whether it takes a shape, and a prefill by it over our blocks."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.host_lengths import HostLengths

Made = TypeVar("Made")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class AttentionShape(NamedTuple):
    """Of a layer, and of the device that it runs on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    capability: int
    """90 for 9.0."""


class Prefill(NamedTuple):
    """A prefill of a layer that libraries have a word for, of a step whose lengths the host knows."""

    args: AttentionArgs
    runs: QueryRuns
    lengths: HostLengths

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query sees; -1: all."""
        return -1 if self.args.sliding_window is None else self.args.sliding_window - 1


class Library(Protocol):
    """One that is installed."""

    name: str

    def refusal(self, shape: AttentionShape) -> str:
        """Why it does not take a shape, in a few words; empty: it does."""
        ...

    def prefill(self, given: Prefill) -> Tensor:
        """(num_tokens, num_heads, head_dim), in `out` where that is given. Raises what the library raises."""
        ...


class Missing(Exception):
    """Why a library is not there, in a few words."""


def module(name: str) -> Any:
    """Raises Missing."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # compiled for another torch, it raises whatever it likes
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        why = " ".join(str(error).split())[:120]
        raise Missing("not installed" if is_absent else f"cannot be imported: {why}") from None


def named(name: str, distribution: str) -> str:
    """With its version, where that is known."""
    try:
        return f"{name} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return name


class OncePerStep(Generic[Made]):
    """What all layers of a step share, made for the first. A step has a tensor of its own, kept so that it is known."""

    def __init__(self) -> None:
        self._step: Tensor | None = None
        self._made: dict[object, Made] = {}

    def get(self, step: Tensor, key: object, make: Callable[[], Made]) -> Made:
        """Of the step whose tensor this is."""
        if step is not self._step:
            self._made.clear()
            self._step = step
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
