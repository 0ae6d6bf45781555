"""Plans a GPU's memory, by named parts, and makes the error message when it does not suffice.

Owns the sum: what is left of the share that the engine may take, after all that a step needs, is for the KV cache.
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
"""Of what is left for the KV cache, that graphs of steps with prefills may take where nobody asked for them."""
WEIGHTS_SHARE: Final = 0.85
"""Of what may be used: what weights leave the rest of a working engine, as a rule of thumb."""
DESKTOP_BYTES: Final = 1 << 30
"""What windows may want of a GPU that draws them, once an engine has planned: a browser, a video, a second screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReserves:
    """Bytes that a step takes beside what a profile of it shows."""

    attention_partials: int = 0
    """Partial results of attention over splits of a long sequence."""
    graphs: int = 0
    """Captured graphs, with the tensors that they read and write, and the buffer of a step's inputs."""
    piecewise_graphs: int = 0
    """The same for steps with prefills; 0 where these have no graphs."""
    sampling: int = 0
    """What sampling with every option makes of a full batch's logits, these included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a device by what takes them, all of them together at most `allowed`."""

    total: int
    utilization: float
    others: int
    """Other programs, and what the driver keeps for ours; other engines with all that they planned for."""
    weights: int
    activations: int
    """Of the largest step, at its peak."""
    logits: int
    """What the head gives and sampling made of it, beyond that: as profiled, with a plain sampler."""
    reserves: StepReserves
    staging: int
    """Buffers through which blocks go to host memory."""
    kv_min: int
    """The least that is of use."""
    host_weights: int = 0
    """In host memory, not on the device: streamed in each forward pass."""
    draws_display: bool = False

    @property
    def allowed(self) -> int:
        """What may be taken, by everybody but windows that come later."""
        return allowed_bytes(self.total, self.utilization, draws_display=self.draws_display)

    @property
    def desktop(self) -> int:
        """Left free for windows where the GPU draws them: what may not be taken, at least `DESKTOP_BYTES`."""
        return self.total - self.allowed if self.draws_display else 0

    @property
    def sampling(self) -> int:
        """Of the logits and all that is made of them: as profiled, or as reckoned where that is more."""
        return max(self.logits, self.reserves.sampling)

    @property
    def needed(self) -> int:
        """All but the KV cache and other programs."""
        return self.weights + self.step + self.graphs + self.staging

    @property
    def kv(self) -> int:
        """What is left for the KV cache; negative when something is missing."""
        return self.allowed - self.others - self.needed

    @property
    def fits(self) -> bool:
        """Whether a KV cache of some use is left."""
        return self.kv >= self.kv_min

    @property
    def graphs(self) -> int:
        """Of all captured graphs."""
        return self.reserves.graphs + self.reserves.piecewise_graphs

    def without_piecewise_graphs(self) -> MemoryPlan:
        """The same where steps with prefills have no graphs."""
        return replace(self, reserves=replace(self.reserves, piecewise_graphs=0))

    @property
    def step(self) -> int:
        """Of a step: activations, logits and what sampling makes of them, attention's partial results."""
        return self.activations + self.sampling + self.reserves.attention_partials

    def summary(self, device: str) -> str:
        """Where the memory goes, on one line."""
        streamed = f"; weights in host memory {gib(self.host_weights)}, streamed each step" if self.host_weights else ""
        return (
            f"memory of {device}: {gib(self.allowed)} of {gib(self.total)} may be used"
            f" (--gpu-memory-utilization {self.utilization:g}{self._desktop_words}):"
            f" {self.parts()}, others {gib(self.others)}{streamed}"
        )

    @property
    def _desktop_words(self) -> str:
        return f", {gib(self.desktop)} kept for the desktop that it draws" if self.desktop else ""

    def parts(self) -> str:
        """Each of them in words, on one line."""
        named = {
            "weights": self.weights,
            "activations": self.activations,
            "logits and sampling": self.sampling,
            "attention's partial results": self.reserves.attention_partials,
            "graphs": self.graphs,
            "staging": self.staging,
            "KV cache": max(self.kv, self.kv_min),
        }
        return ", ".join(f"{name} {gib(size)}" for name, size in named.items() if size)

    def check(self, model: str, device: str, holders: Callable[[], tuple[str, int]] = lambda: ("", 0)) -> None:
        """Raise KvscopeError, on one line, with what is needed, what there is, and what would help; `holders` is asked
        who the others are, and the bytes that are known of them."""
        if self.fits:
            return
        asked = self.needed + self.kv_min
        headroom = self.allowed - self.others
        names, known = holders()
        raise KvscopeError(
            f"no memory for model {model!r}: it needs {gib(asked)} ({self.parts()}),"
            f" {gib(headroom)} of the {gib(self.total)} of {device} may be used"
            f" (--gpu-memory-utilization {self.utilization:g}{self._desktop_words}, others hold {gib(self.others)}"
            f"{f': {names}' if names else ''}): {self._way_out(asked, known)}"
        )

    def _way_out(self, asked: int, known: int) -> str:
        if 0 < asked - (self.allowed - self.others) <= known:
            return "end one of these, or start it with a lower --gpu-memory-utilization if it is an engine"
        there = self.total - self.others - self.draws_display * DESKTOP_BYTES
        if asked - self.activations - self.sampling - self.graphs > there:
            size, weights = gib((asked + self.others) / self.utilization), gib(self._weights_that_fit())
            return f"a GPU of {size} holds it, this one a model whose weights take {weights}"
        if asked <= there:
            share = math.ceil(100 * (asked + self.others) / self.total) / 100
            return f"free some, or give --gpu-memory-utilization {share:.2f}"
        return "free some, or use a smaller --max-num-batched-tokens, --max-num-seqs or model"

    def _weights_that_fit(self) -> int:
        """With what a step of this model takes beside them."""
        return max(0, self.allowed - self.others - (self.needed - self.weights) - self.kv_min)


def allowed_bytes(total: int, utilization: float, *, draws_display: bool) -> int:
    """Of a device: a share, and where it draws windows never all but `DESKTOP_BYTES`."""
    share = int(total * utilization)
    return max(0, min(share, total - DESKTOP_BYTES)) if draws_display else share


def with_room_for_blocks(plan: MemoryPlan, share: float = PIECEWISE_SHARE) -> MemoryPlan:
    """The same without graphs of steps with prefills where these would take more than `share` of the KV cache."""
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
    """Before anything is loaded: raise KvscopeError, on one line, when the weights alone are more than `spare`.

    `on_host` bytes of them are kept in host memory; None: none can be. `holders` is asked who has memory of it.
    """
    needed = max(0, num_parameters * itemsize - (on_host or 0))
    if needed > spare:
        beside = f"beside {gib(on_host)} in host memory" if on_host else "alone"
        names = holders()
        held = f" beside {names}" if names else ""
        size = WEIGHTS_SHARE * spare / itemsize / 1e9
        raise KvscopeError(
            f"no memory for model {name!r}: its {num_parameters / 1e9:.1f} billion parameters take {gib(needed)}"
            f" {beside}, {gib(spare)} of the {gib(total)} of {device} may be used{held}: a step and some KV cache"
            f" included, a model of about {size:.0f} billion fits there, and this one a GPU of"
            f" {gib(needed / WEIGHTS_SHARE * total / max(spare, 1))}{_offload_that_fits(on_host, needed, spare)}"
        )


def _offload_that_fits(on_host: int | None, needed: int, headroom: int) -> str:
    if on_host is None:
        return ""
    num_gib = math.ceil((on_host + needed - WEIGHTS_SHARE * headroom) / GIB)
    return f", or --cpu-offload-gb {num_gib} (slower: copied from host memory in each step)"


def gib(num_bytes: int | float) -> str:
    """In GiB, or MiB where that would say nothing."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.1f} MiB"
