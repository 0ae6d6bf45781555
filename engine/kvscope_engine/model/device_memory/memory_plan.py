"""Plans a GPU's memory by purpose, and composes the error message when it does not suffice.

The KV cache gets the part of the engine's share that remains after everything that a step needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.errors import KvscopeError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
PIECEWISE_SHARE: Final = 0.25
"""Maximum share of the memory available to the KV cache that CUDA graphs of steps with prefills may take,
unless the user requested these graphs.
"""
WEIGHTS_SHARE: Final = 0.85
"""Share of the usable memory that weights may take if a step and some KV cache are to fit as well. A rule of thumb."""
DESKTOP_BYTES: Final = 1 << 30
"""Bytes left free on a GPU that draws a display, for windows, a video or a second screen opened after planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReserves:
    """Bytes that steps need in addition to those that a profile run measures, by purpose."""

    attention_partials: int = 0
    """Bytes of the partial results of attention over the splits of long sequences."""
    graphs: int = 0
    """Bytes of the captured graphs of decodes, the tensors that they read and write, and the input buffer of a step."""
    piecewise_graphs: int = 0
    """Bytes of the graphs of steps with prefills and of their tensors; 0 without such graphs."""
    sampling: int = 0
    """Bytes of the logits of a full batch and of the tensors of sampling with every option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a device by purpose. Their sum is at most `allowed` if the plan fits."""

    total: int
    utilization: float
    others: int
    """Bytes of other programs, including those that other engines have only planned for, and of this process's driver
    context.
    """
    weights: int
    activations: int
    logits: int
    """Bytes of the logits and of plain sampling in addition to the activations, as profiled."""
    reserves: StepReserves
    staging: int
    """Bytes of the buffers through which blocks are copied to host memory."""
    kv_min: int
    """Minimum bytes of a useful KV cache."""
    host_weights: int = 0
    """Bytes of weights kept in host memory and streamed to the device in each forward pass."""
    draws_display: bool = False

    @property
    def allowed(self) -> int:
        """Bytes that all programs together may take. Windows that are opened later are not included."""
        return allowed_bytes(self.total, self.utilization, draws_display=self.draws_display)

    @property
    def desktop(self) -> int:
        """Bytes left free for windows: everything above `allowed` if the GPU draws a display, else 0."""
        return self.total - self.allowed if self.draws_display else 0

    @property
    def sampling(self) -> int:
        """Bytes of the logits and of sampling: the larger of the profiled and the estimated bytes."""
        return max(self.logits, self.reserves.sampling)

    @property
    def needed(self) -> int:
        """Bytes of everything but the KV cache and other programs."""
        return self.weights + self.step + self.graphs + self.staging

    @property
    def kv(self) -> int:
        """Bytes left for the KV cache; negative if memory is missing."""
        return self.allowed - self.others - self.needed

    @property
    def fits(self) -> bool:
        """Whether at least `kv_min` bytes are left for the KV cache."""
        return self.kv >= self.kv_min

    @property
    def graphs(self) -> int:
        return self.reserves.graphs + self.reserves.piecewise_graphs

    def without_piecewise_graphs(self) -> MemoryPlan:
        return replace(self, reserves=replace(self.reserves, piecewise_graphs=0))

    @property
    def step(self) -> int:
        """Bytes of a step: activations, logits and sampling, and attention's partial results."""
        return self.activations + self.sampling + self.reserves.attention_partials

    def summary(self, device: str) -> str:
        streamed = f"; weights in host memory {gib(self.host_weights)}, streamed each step" if self.host_weights else ""
        return (
            f"memory of {device}: {gib(self.allowed)} of {gib(self.total)} may be used"
            f" (--gpu-memory-utilization {self.utilization:g}{self._desktop_text}):"
            f" {self.parts()}, others {gib(self.others)}{streamed}"
        )

    @property
    def _desktop_text(self) -> str:
        return f", {gib(self.desktop)} kept for the desktop that it draws" if self.desktop else ""

    def parts(self) -> str:
        sizes = {
            "weights": self.weights,
            "activations": self.activations,
            "logits and sampling": self.sampling,
            "attention's partial results": self.reserves.attention_partials,
            "graphs": self.graphs,
            "staging": self.staging,
            "KV cache": max(self.kv, self.kv_min),
        }
        return ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)

    def check(self, model: str, device: str, holders: Callable[[], tuple[str, int]] = lambda: ("", 0)) -> None:
        """Raise KvscopeError if the plan does not fit.

        The message is one line with the needed bytes, the available bytes, and a remedy. `holders` returns a
        description of the other processes on the GPU and the sum of their known bytes.
        """
        if self.fits:
            return
        needed = self.needed + self.kv_min
        headroom = self.allowed - self.others
        names, holder_bytes = holders()
        raise KvscopeError(
            f"no memory for model {model!r}: it needs {gib(needed)} ({self.parts()}),"
            f" {gib(headroom)} of the {gib(self.total)} of {device} may be used"
            f" (--gpu-memory-utilization {self.utilization:g}{self._desktop_text}, others hold {gib(self.others)}"
            f"{f': {names}' if names else ''}): {self._remedy(needed, holder_bytes)}"
        )

    def _remedy(self, needed: int, holder_bytes: int) -> str:
        if 0 < needed - (self.allowed - self.others) <= holder_bytes:
            return "end one of these, or start it with a lower --gpu-memory-utilization if it is an engine"
        available = self.total - self.others - self.draws_display * DESKTOP_BYTES
        if needed - self.activations - self.sampling - self.graphs > available:
            size, weights = gib((needed + self.others) / self.utilization), gib(self._weights_that_fit())
            return f"a GPU of {size} holds it, this one a model whose weights take {weights}"
        if needed <= available:
            share = math.ceil(100 * (needed + self.others) / self.total) / 100
            return f"free some, or give --gpu-memory-utilization {share:.2f}"
        return "free some, or use a smaller --max-num-batched-tokens, --max-num-seqs or model"

    def _weights_that_fit(self) -> int:
        return max(0, self.allowed - self.others - (self.needed - self.weights) - self.kv_min)


def allowed_bytes(total: int, utilization: float, *, draws_display: bool) -> int:
    """Return the usable bytes of a device: a share of it, leaving at least `DESKTOP_BYTES` if it draws a display."""
    share = int(total * utilization)
    return max(0, min(share, total - DESKTOP_BYTES)) if draws_display else share


def drop_large_piecewise_graphs(plan: MemoryPlan, share: float = PIECEWISE_SHARE) -> MemoryPlan:
    """Return the plan, without graphs of steps with prefills if they would take more than `share` of the KV cache's
    memory.
    """
    without = plan.without_piecewise_graphs()
    return plan if plan.fits and plan.reserves.piecewise_graphs <= share * without.kv else without


def check_weights_fit(
    name: str,
    num_parameters: int,
    itemsize: int,
    spare: int,
    total: int,
    device: str,
    on_host: int | None = None,
    holders: Callable[[], str] = lambda: "",
) -> None:
    """Raise KvscopeError, with a message of one line, if the weights alone exceed `spare` bytes. Call it before
    loading.

    `on_host`: bytes of weights kept in host memory; None if weights cannot be kept there. `holders` describes the
    processes that hold memory of the GPU.
    """
    needed = max(0, num_parameters * itemsize - (on_host or 0))
    if needed > spare:
        host_text = f"beside {gib(on_host)} in host memory" if on_host else "alone"
        names = holders()
        holder_text = f" beside {names}" if names else ""
        size = WEIGHTS_SHARE * spare / itemsize / 1e9
        raise KvscopeError(
            f"no memory for model {name!r}: its {num_parameters / 1e9:.1f} billion parameters take {gib(needed)}"
            f" {host_text}, {gib(spare)} of the {gib(total)} of {device} may be used{holder_text}:"
            f" a step and some KV cache included, a model of about {size:.0f} billion fits there, and this one a GPU of"
            f" {gib(needed / WEIGHTS_SHARE * total / max(spare, 1))}{_offload_that_fits(on_host, needed, spare)}"
        )


def _offload_that_fits(on_host: int | None, needed: int, headroom: int) -> str:
    if on_host is None:
        return ""
    num_gib = math.ceil((on_host + needed - WEIGHTS_SHARE * headroom) / GIB)
    return f", or --cpu-offload-gb {num_gib} (slower: copied from host memory in each step)"


def gib(num_bytes: int | float) -> str:
    """Format a size in GiB, or in MiB below 0.1 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.1f} MiB"
