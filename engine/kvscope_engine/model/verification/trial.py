"""A trial run of the model as it came, kept so that whatever replaces a part of it can be proven equal.

Owns the captured calls and the comparison. A replacement is tried on what its original was given and must return
what that returned, also at positions far out and for numbers far larger; no list of architectures is needed, and none
can be out of date. It holds on to no module: what is replaced is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_engine.model.layers.attention.paged_attention import AttentionContext, AttentionOptions
from kvscope_engine.model.tensor_agreement import close
from kvscope_engine.model.verification.check_script import far_positions

UNSEEN: Final = frozenset(
    {
        "aten::arange",
        "aten::ceil",
        "aten::clamp",
        "aten::clamp_max",
        "aten::clamp_min",
        "aten::floor",
        "aten::floor_divide",
        "aten::hardtanh",
        "aten::maximum",
        "aten::minimum",
        "aten::remainder",
        "aten::round",
        "aten::trunc",
        "aten::where",
    }
)
POSITIONS: Final = (3, 17, 0, 90, 41)
STRAIN: Final = {torch.float16: 8.0}
DEFAULT_STRAIN: Final = 1000.0
"""What inputs are multiplied by for a second try: bounds that cut nothing off at first do then."""


class Disagreement(Exception):
    """A replacement did something else than its original."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What a module was given and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def strained(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The same call with larger numbers, under a context of its own; None when it is not known which."""
        kwargs = self.kwargs | ({"paged": TrialContext()} if "paged" in self.kwargs else {})
        if self.args and _is_float(self.args[0]):
            return (_larger(self.args[0]), *self.args[1:]), kwargs
        if _is_float(kwargs.get("hidden_states")):
            return self.args, kwargs | {"hidden_states": _larger(kwargs["hidden_states"])}
        return None


@dataclass(slots=True)
class TrialContext(AttentionContext):
    """The first call of a layer is kept, a later one must be the same."""

    layers: dict[int, tuple[tuple[torch.Tensor, ...], AttentionOptions, torch.Tensor]] = field(default_factory=dict)
    scratch: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Some output of the right shape, the same for the same layer."""
        given = (query, key, value)
        if layer not in self.layers:
            generator = torch.Generator().manual_seed(layer)
            shape = (*query.shape[:2], options.value_dim(value))
            output = torch.randn(shape, generator=generator).to(query)
            self.layers[layer] = (given, options, output)
        expected, expected_options, output = self.layers[layer]
        if not (close(given, expected) and _same(options, expected_options)):
            raise Disagreement(f"layer {layer} attends differently")
        return output


@dataclass(slots=True)
class Trial:
    """The calls of one forward, by module; a module that is gone has none."""

    context: TrialContext
    calls: MutableMapping[nn.Module, ModuleCall] = field(default_factory=WeakKeyDictionary)

    def proves(self, original: nn.Module, replacement: Callable[..., Any], *, has_known_bounds: bool = False) -> bool:
        """Whether `replacement`, given what `original` was given, returns what it returned.

        And again with larger numbers, where it also may not lack an operation that a trial can miss (`UnseenOps`),
        unless what `original` does to numbers is known otherwise (`has_known_bounds`).
        """
        call = self.calls.get(original)
        strained = None if call is None else call.strained()
        if call is None or strained is None:
            return False
        self.context.scratch.clear()
        try:
            with torch.inference_mode():
                if not close(replacement(*call.args, **call.kwargs), call.output):
                    return False
                return _agree_on(strained, original, replacement, has_known_bounds)
        except (Disagreement, RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False


def run_trial(module: nn.Module) -> Trial:
    """One short forward of the untouched model, every module's call kept. Each module is called once, or not kept."""
    device = next(module.parameters()).device
    positions = torch.tensor([(*POSITIONS, *far_positions(module.config))], device=device)
    vocab_size = int(module.config.get_text_config(decoder=True).vocab_size)  # type: ignore[operator, union-attr]
    ids = (torch.arange(positions.shape[1], device=device)[None] * 31 + 7) % vocab_size
    trial = Trial(TrialContext())
    with torch.inference_mode(), _captured(module, trial.calls):
        module(input_ids=ids, position_ids=positions, use_cache=False, paged=trial.context)
    return trial


def _agree_on(
    strained: tuple[tuple[Any, ...], dict[str, Any]],
    original: nn.Module,
    replacement: Callable[..., Any],
    has_known_bounds: bool,
) -> bool:
    args, kwargs = strained
    with UnseenOps() as needed:
        expected = original(*args, **kwargs)
    context = kwargs.get("paged")
    if context is not None:
        context.scratch.clear()
    with UnseenOps() as done:
        actual = replacement(*args, **kwargs)
    return (has_known_bounds or needed.names <= done.names) and close(actual, expected)


@contextmanager
def _captured(module: nn.Module, calls: MutableMapping[nn.Module, ModuleCall]) -> Iterator[None]:
    repeated: set[nn.Module] = set()

    def keep(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if part in calls:
            repeated.add(part)
        calls[part] = ModuleCall(args, kwargs, output)

    handles = [part.register_forward_hook(keep, with_kwargs=True) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in repeated:
            del calls[part]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _larger(values: torch.Tensor) -> torch.Tensor:
    return values * STRAIN.get(values.dtype, DEFAULT_STRAIN)


def _same(one: AttentionOptions, other: AttentionOptions) -> bool:
    return (
        one.sinks is other.sinks
        and one.scale == other.scale
        and (one.sliding_window, one.is_chunked) == (other.sliding_window, other.is_chunked)
        and one.softcap == other.softcap
    )


class UnseenOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations that a trial on a few tokens may leave without effect: bounds, rounding down, counting.

    Owns their list, and the watch for them. Whoever replaces a part of a model must do them as well.

    Which of them run inside; in place or not is the same.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removesuffix("_")
        if name in UNSEEN:
            self.names.add(name)
        return func(*args, **(kwargs or {}))
