"""A trial run of the model as it came, kept so that whatever replaces a part of it can be proven equal.

Owns the captured calls and the comparison. A replacement is tried on what its original was given and must return
what that returned; no list of architectures is needed, and none can be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.running.attention import AttentionOptions

POSITIONS: Final = (3, 17, 0, 90, 41)
TOLERANCE: Final = {torch.float32: 1e-4, torch.float64: 1e-4}
LOW_PRECISION_TOLERANCE: Final = 2e-2
WHOLE_TOLERANCE: Final = 0.3
"""Of a whole model in half precision, each of whose parts was proven: its rounding adds up over the layers."""


class Disagreement(Exception):
    """A replacement did something else than its original."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a module was given and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(slots=True)
class TrialContext:
    """Stands in for a `PagedContext`: the first call of a layer is kept, a later one must be the same."""

    layers: dict[int, tuple[tuple[torch.Tensor, ...], AttentionOptions, torch.Tensor]] = field(default_factory=dict)
    scratch: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Some output of the right shape, the same for the same layer."""
        given = (query, key, value)
        if layer not in self.layers:
            generator = torch.Generator().manual_seed(layer)
            shape = (*query.shape[:2], value.shape[-1])
            output = torch.randn(shape, generator=generator).to(query)
            self.layers[layer] = (given, options, output)
        expected, expected_options, output = self.layers[layer]
        if not (close(given, expected) and _same(options, expected_options)):
            raise Disagreement(f"layer {layer} attends differently")
        return output


@dataclass(slots=True)
class Trial:
    """The calls of one forward, by module, and what the model was given."""

    context: TrialContext
    calls: dict[nn.Module, Call]
    inputs: dict[str, Any] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def proves(self, original: nn.Module, replacement: Callable[..., Any]) -> bool:
        """Whether `replacement`, given what `original` was given, returns what it returned."""
        call = self.calls.get(original)
        if call is None:
            return False
        self.context.scratch.clear()
        try:
            with torch.inference_mode():
                return close(replacement(*call.args, **call.kwargs), call.output)
        except (Disagreement, RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False

    def proves_as_a_whole(self, module: nn.Module) -> bool:
        """Whether the model, with its parts replaced, still runs, and gives its logits but for rounding."""
        try:
            with torch.inference_mode():
                logits = module(**self.inputs, paged=TrialContext()).logits
        except (RuntimeError, TypeError, ValueError):
            return False
        return _is_close_for_most_tokens(logits, self.logits)


def run_trial(module: nn.Module) -> Trial:
    """One short forward of the untouched model, every module's call kept. Each module is called once, or not kept."""
    device = next(module.parameters()).device
    positions = torch.tensor([POSITIONS], device=device)
    ids = (positions * 31 + 7) % int(module.config.get_text_config(decoder=True).vocab_size)  # type: ignore[operator, union-attr]
    trial = Trial(TrialContext(), {}, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    with torch.inference_mode(), _captured(module, trial.calls):
        trial.logits = module(**trial.inputs, paged=trial.context).logits
    return trial


def close(actual: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Whether two results are equal but for rounding: tensors, None, or tuples of them.

    `tolerance` is the root mean square of the difference over that of `expected`; by default it fits the type.
    """
    if isinstance(expected, tuple | list):
        same_length = isinstance(actual, tuple | list) and len(actual) == len(expected)
        return same_length and all(close(a, e, tolerance) for a, e in zip(actual, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return type(actual) is type(expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = TOLERANCE.get(expected.dtype, LOW_PRECISION_TOLERANCE) if tolerance is None else tolerance
    difference = (actual.float() - expected.float()).square().mean().sqrt()
    return bool(difference <= tolerance * expected.float().square().mean().sqrt())


def _is_close_for_most_tokens(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """The median token's error: over many layers rounding may grow without bound for a single one."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error = (actual.float() - expected.float()).square().mean(-1).sqrt()
    size = expected.float().square().mean(-1).sqrt()
    return bool((error / size).median() <= WHOLE_TOLERANCE)


@contextmanager
def _captured(module: nn.Module, calls: dict[nn.Module, Call]) -> Iterator[None]:
    repeated: set[nn.Module] = set()

    def keep(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if part in calls:
            repeated.add(part)
        calls[part] = Call(args, kwargs, output)

    handles = [part.register_forward_hook(keep, with_kwargs=True) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in repeated:
            del calls[part]


def _same(one: AttentionOptions, other: AttentionOptions) -> bool:
    return (
        one.sinks is other.sinks
        and one.scale == other.scale
        and one.sliding_window == other.sliding_window
        and one.softcap == other.softcap
    )
