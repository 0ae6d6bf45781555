"""Measures the time, memory and error of attention methods on samples of a model's layers."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvscope_engine.bench.laboratory.captured import LayerSample
from kvscope_engine.bench.laboratory.methods import FULL, METHODS, AttentionMethod


class Measurement(TypedDict):
    """Result of one method at one context length. Times and bytes are per layer."""

    method: str
    length: int
    time_us: float
    kv_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: float
    """`kv_bytes` divided by batch size and context length."""
    workspace_bytes_per_token: float
    error: float
    """Root mean square of the difference from full attention's output, relative to the root mean square of full
    attention's output.
    """
    perplexity: float | None
    perplexity_change: float | None


@torch.inference_mode()
def measure_methods(
    samples: Sequence[LayerSample], repeats: int, show_progress: Callable[[str], None]
) -> list[Measurement]:
    """Measure all methods in interleaved rounds, so that other load on the machine affects all of them equally."""
    batch, length = len(samples[0].query), len(samples[0].keys)
    filled_methods = {name: [_make_filled(make, sample) for sample in samples] for name, make in METHODS.items()}
    expected = [method.attend(sample.query) for method, sample in zip(filled_methods[FULL], samples, strict=True)]
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(repeats + 1):  # the first warms up
        show_progress(f"{length} tokens: turn {turn} of {repeats}")
        for name, methods in filled_methods.items():
            elapsed_ns = sum(_time_ns(m, s.query) for m, s in zip(methods, samples, strict=True))
            times[name].append(elapsed_ns / len(samples) / 1e3)
    rows = []
    for name, methods in filled_methods.items():
        pairs = list(zip(methods, samples, strict=True))
        kv, workspace = methods[0].stored_bytes, workspace_bytes(partial(methods[0].attend, samples[0].query))
        rows.append(
            Measurement(
                method=name,
                length=length,
                time_us=statistics.median(times[name][1:]),
                kv_bytes=kv,
                workspace_bytes=workspace,
                kv_bytes_per_token=kv / (batch * length),
                workspace_bytes_per_token=workspace / (batch * length),
                error=_error([m.attend(s.query) for m, s in pairs], expected),
                perplexity=None,
                perplexity_change=None,
            )
        )
    return rows


def _make_filled(make: Callable[[], AttentionMethod], sample: LayerSample) -> AttentionMethod:
    """Create an attention method that stores a copy of the sample's keys and values for each request of the batch."""
    method, batch = make(), len(sample.query)
    method.store_kv(*(each[None].repeat(batch, 1, 1, 1) for each in (sample.keys, sample.values)))
    return method


def _time_ns(method: AttentionMethod, query: Tensor) -> int:
    _wait(query)
    started_ns = time.perf_counter_ns()
    method.attend(query)
    _wait(query)
    return time.perf_counter_ns() - started_ns


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    squared_error = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    squared_norm = sum(float(b.double().square().sum()) for b in expected)
    return (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0


def workspace_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of the tensors that `run` creates, including its result, on any device.

    Memory that an operation uses internally is not counted.
    """
    storages = _Storages()
    with storages:
        run()
    return int(storages.peak)


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._num_bytes = 0
        self._known_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._known_storages:
                self._record(leaf.untyped_storage(), 0)  # existed before the run
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._known_storages:
                self._record(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return result

    def _record(self, storage: torch.UntypedStorage, size: int) -> None:
        self._known_storages.add(storage._cdata)
        self._num_bytes += size
        self.peak = max(self.peak, self._num_bytes)
        weakref.finalize(storage, self._remove, storage._cdata, size)

    def _remove(self, key: int, size: int) -> None:
        self._known_storages.discard(key)
        self._num_bytes -= size
