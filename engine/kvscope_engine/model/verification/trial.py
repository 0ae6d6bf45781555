"""Trial run of the original model, recorded so that replacements of its parts can be checked.

Owns the recorded calls and the comparison. A replacement gets the input of the original and must return the same
output, also for high positions and much larger numbers, so that no list of supported architectures is needed. Modules
are referenced weakly, so that replaced modules are freed.
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
from kvscope_engine.model.tensor_agreement import is_close
from kvscope_engine.model.verification.check_script import far_positions
from kvscope_engine.model.verification.passed_checks import PassedChecks

VALUE_DEPENDENT_OPS: Final = frozenset(
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
"""Operations whose effect depends on values: they may change nothing for the few tokens of a trial."""
POSITIONS: Final = (3, 17, 0, 90, 41)
"""Positions of the trial's tokens, followed by `far_positions`. They are neither consecutive nor in order, so that a
replacement that computes positions itself differs.
"""
STRAIN_FACTORS: Final = {torch.float16: 8.0}
"""Exceptions from `DEFAULT_STRAIN_FACTOR`: with that factor, results would exceed the range of float16."""
DEFAULT_STRAIN_FACTOR: Final = 1000.0
"""Factor by which inputs are larger in a second comparison, so that clamps take effect that had none in the first."""


class ReplacementDiffers(Exception):
    """A replacement of a module gives another output than the original."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def strained(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with larger numbers and a new context; None if the module's input is unknown."""
        kwargs = self.kwargs | ({"paged": TrialContext()} if "paged" in self.kwargs else {})
        if self.args and _is_float(self.args[0]):
            return (_larger(self.args[0]), *self.args[1:]), kwargs
        if _is_float(kwargs.get("hidden_states")):
            return self.args, kwargs | {"hidden_states": _larger(kwargs["hidden_states"])}
        return None


@dataclass(slots=True)
class TrialContext(AttentionContext):
    """Attention context that records the arguments of each layer's first call. Later calls of the layer must
    have equal arguments.
    """

    layers: dict[int, tuple[tuple[torch.Tensor, ...], AttentionOptions, torch.Tensor]] = field(default_factory=dict)
    scratch: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return a random output of the right shape, the same for each call of a layer."""
        tensors = (query, key, value)
        if layer not in self.layers:
            generator = torch.Generator().manual_seed(layer)
            shape = (*query.shape[:2], options.value_dim(value))
            output = torch.randn(shape, generator=generator).to(query)
            self.layers[layer] = (tensors, options, output)
        expected, expected_options, output = self.layers[layer]
        if not (is_close(tensors, expected) and _are_options_equal(options, expected_options)):
            raise ReplacementDiffers(f"layer {layer} attends differently")
        return output


@dataclass(slots=True)
class Trial:
    """Calls of one forward pass, by module (weakly referenced)."""

    context: TrialContext
    calls: MutableMapping[nn.Module, ModuleCall] = field(default_factory=WeakKeyDictionary)
    names: MutableMapping[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    """Name of each module in the model."""
    passed: PassedChecks = field(default_factory=PassedChecks)

    def proves(self, original: nn.Module, replacement: Callable[..., Any], *, has_known_bounds: bool = False) -> bool:
        """Whether `replacement` returns the output of `original` for its recorded input, and for larger numbers.

        With larger numbers it must also execute all operations of `original` whose effect depends on values
        (`ValueDependentOpRecorder`), since equal outputs do not prove these. With `has_known_bounds`, this is not
        required: the caller has compared the parts that bound numbers itself, on small and large inputs (such as
        `gate_of`).

        If an earlier start compared them (`passed`), its result is returned.
        """
        return self.passed.is_equivalent(
            self.names.get(original, ""), lambda: self._is_equivalent(original, replacement, has_known_bounds)
        )

    def _is_equivalent(self, original: nn.Module, replacement: Callable[..., Any], has_known_bounds: bool) -> bool:
        call = self.calls.get(original)
        strained = None if call is None else call.strained()
        if call is None or strained is None:
            return False
        self.context.scratch.clear()
        try:
            with torch.inference_mode():
                if not is_close(replacement(*call.args, **call.kwargs), call.output):
                    return False
                return _agree_on(strained, original, replacement, has_known_bounds)
        except (ReplacementDiffers, RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            if "allocate memory" in str(error):  # a later start may have enough
                self.passed.discard()
            return False


def run_trial(module: nn.Module, passed: PassedChecks | None = None) -> Trial:
    """Run one short forward pass of the original model and record the call of every module that is called once.

    `passed`: checks that an earlier start made, whose results `Trial.proves` returns.
    """
    device = next(module.parameters()).device
    positions = torch.tensor([(*POSITIONS, *far_positions(module.config))], device=device)
    vocab_size = int(module.config.get_text_config(decoder=True).vocab_size)  # type: ignore[operator, union-attr]
    # Any different tokens will do; these are spread out and not the first ones, which are often special tokens.
    ids = (torch.arange(positions.shape[1], device=device)[None] * 31 + 7) % vocab_size
    trial = Trial(TrialContext(), passed=passed or PassedChecks())
    trial.names.update((submodule, name) for name, submodule in module.named_modules())
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
    with ValueDependentOpRecorder() as original_ops:
        expected = original(*args, **kwargs)
    context = kwargs.get("paged")
    if context is not None:
        context.scratch.clear()
    with ValueDependentOpRecorder() as replacement_ops:
        actual = replacement(*args, **kwargs)
    return (has_known_bounds or original_ops.names <= replacement_ops.names) and is_close(actual, expected)


@contextmanager
def _captured(module: nn.Module, calls: MutableMapping[nn.Module, ModuleCall]) -> Iterator[None]:
    repeated: set[nn.Module] = set()

    def record_call(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if submodule in calls:
            repeated.add(submodule)
        calls[submodule] = ModuleCall(args, kwargs, output)

    handles = [submodule.register_forward_hook(record_call, with_kwargs=True) for submodule in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for submodule in repeated:
            del calls[submodule]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _larger(values: torch.Tensor) -> torch.Tensor:
    return values * STRAIN_FACTORS.get(values.dtype, DEFAULT_STRAIN_FACTOR)


def _are_options_equal(actual: AttentionOptions, expected: AttentionOptions) -> bool:
    return (
        actual.sinks is expected.sinks
        and actual.scale == expected.scale
        and (actual.sliding_window, actual.is_chunked) == (expected.sliding_window, expected.is_chunked)
        and actual.softcap == expected.softcap
    )


class ValueDependentOpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the executed operations that may have no effect on a few tokens (`VALUE_DEPENDENT_OPS`).

    A replacement must execute the same operations, although the tokens of a trial may not show a difference. In-place
    variants count as the same operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removesuffix("_")
        if name in VALUE_DEPENDENT_OPS:
            self.names.add(name)
        return func(*args, **(kwargs or {}))
