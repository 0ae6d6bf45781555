"""What training a model takes of each GPU: a step of it run on tensors without data, and how ZeRO divides what is held.

Weights, gradients and the optimizer's states are counted as torch makes them; activations are what autograd really
keeps of transformers' own forward, with the loss's float32 logits, at the worst moment of forward, backward and the
optimizer's step. Sources of what is reckoned:

- `mixed`: 16-bit weights and gradients beside float32 master weights and Adam's two moments, 2 + 2 + 12 bytes a
  parameter: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 3.1.
- ZeRO's stages divide among N data-parallel ranks: 1 the optimizer's states, 2 gradients too, 3 weights too, where
  each rank gathers one layer at a time: the same, section 5 and figure 1.
- Gradient checkpointing keeps each layer's input and computes the rest again: Chen et al. 2016, arXiv:1604.06174.
- For GPT's layers with dropout, what is kept without it is s*b*h*(34 + 5*a*s/h) bytes a layer: Korthikanti et al.
  2022, arXiv:2205.05198, equation 2; here it is counted, since today's layers are others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvscope_engine.model.hf_config import position_limit
from kvscope_engine.planning.inference import CONTEXT_BYTES
from kvscope_engine.planning.live_memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS, LiveMemory
from kvscope_engine.planning.skeleton import Skeleton, build
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

PRECISIONS: Final = ("mixed", "autocast", "bfloat16", "float32")
OPTIMIZERS: Final = ("adamw", "sgd")
MASTER_BYTES: Final = 12
"""A parameter in `mixed`: a float32 copy and Adam's two moments; without Adam the copy alone, 4."""
ZERO_STAGES: Final = (0, 1, 2, 3)
DEFAULT_LENGTH: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingQuestion:
    """What is asked."""

    batch_size: int = 1
    """Sequences of one forward pass on one GPU (micro batch)."""
    length: int | None = None
    """Tokens of each; None: 2,048, or as many as the model can do where that is less."""
    precision: str = "mixed"
    """`mixed`: 16-bit weights with float32 master weights; `autocast`: torch's, float32 weights whose products are in
    bfloat16; or all in one type."""
    optimizer: str = "adamw"
    checkpointing: bool = False
    """Gradient checkpointing."""
    zero: int = 0
    """ZeRO's stage."""
    data_parallel: int = 1
    """Ranks that it divides among."""

    def __post_init__(self) -> None:
        for name, accepted in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("zero", ZERO_STAGES)):
            if getattr(self, name) not in accepted:
                words = ", ".join(map(str, accepted))
                raise BadInput(f"{name}={getattr(self, name)!r} is not accepted: one of {words}")
        for name, most in (("batch_size", 1 << 16), ("length", 1 << 22), ("data_parallel", 1 << 20)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise BadInput(f"{name}={value} is not accepted: a whole number from 1 to {most}")

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the weights that products read."""
        return torch.float32 if self.precision in ("autocast", "float32") else torch.bfloat16

    @property
    def shares(self) -> Mapping[str, float]:
        """What this rank holds of each kind."""
        part = 1.0 / self.data_parallel
        return {
            OPTIMIZER: part if self.zero >= 1 else 1.0,
            GRADIENTS: part if self.zero >= 2 else 1.0,
            WEIGHTS: part if self.zero >= 3 else 1.0,
        }


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Bytes of one GPU at the worst moment of a step."""

    question: TrainingQuestion
    weights: int
    gradients: int
    """All of them, as they are when the optimizer begins."""
    optimizer: int
    activations: int
    """At the end of the forward pass: what backward needs, and the loss."""
    worst: str
    """"forward", "backward" or "optimizer": when most is held."""
    at_worst: Mapping[str, int]
    """What is held then, of each kind."""
    gathered: int
    """Then, of weights that ZeRO's third stage has whole for a while: the largest layer, twice."""
    others: int = CONTEXT_BYTES

    @property
    def temporary(self) -> int:
        """Of `at_worst`'s activations, what the forward pass had not kept: results of the operations that run then."""
        return max(0, self.at_worst[ACTIVATIONS] - self.activations)

    @property
    def peak(self) -> int:
        """Of all kinds at the worst moment, `gathered` included."""
        return sum(self.at_worst.values()) + self.gathered

    @property
    def needed(self) -> int:
        """What a GPU must have."""
        return self.peak + self.others


def plan_training(skeleton: Skeleton, question: TrainingQuestion) -> TrainingPlan:
    """A step of training on tensors without data.

    Raises BadInput where the model cannot be that long, or its code cannot be run without data.
    """
    question = replace(question, length=_length(skeleton, question.length))
    try:
        with FakeTensorMode():
            return measured_step(skeleton, question)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # a external model raises what it likes
        line = " ".join(str(error).split())
        raise BadInput(
            f"training of model {skeleton.name!r} cannot be planned: {type(error).__name__}: {line:.200}"
        ) from error


def _length(skeleton: Skeleton, asked: int | None) -> int:
    limit = position_limit(skeleton.config)
    if asked is None:
        return min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if limit is not None and asked > limit:
        raise BadInput(f"length={asked} is not accepted: model {skeleton.name!r} can do {limit}")
    return asked


def measured_step(skeleton: Skeleton, question: TrainingQuestion) -> TrainingPlan:
    """Build the model where the caller is, on a CPU or without data, train a step, and say what it took."""
    module = _trainable(skeleton, question)
    parameters = list(module.parameters())
    memory = LiveMemory(question.shares)
    peaks: dict[str, dict[str, float]] = {}
    with memory:
        memory.name(WEIGHTS, [*parameters, *module.buffers()])
        optimizer = _optimizer(question, module, parameters)
        master = _master(question, parameters)
        memory.name(OPTIMIZER, master)
        for parameter in parameters:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(lambda p: memory.name(GRADIENTS, [p.grad]))
        _have_states(optimizer, parameters, memory)
        memory.restart_peak()
        loss = _forward(module, question)
        kept = memory.now[ACTIVATIONS]
        peaks["forward"] = memory.peak
        memory.restart_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        peaks["backward"] = memory.peak
        memory.restart_peak()
        gradients = memory.now[GRADIENTS]
        if optimizer is not None:
            optimizer.step()
        peaks["optimizer"] = memory.peak
    gathered = {name: 0 if name == "optimizer" else _gathered(skeleton, question) for name in peaks}
    worst = max(peaks, key=lambda name: sum(peaks[name].values()) + gathered[name])
    held = memory.now
    return TrainingPlan(
        question=question,
        weights=round(held[WEIGHTS]),
        gradients=round(gradients),
        optimizer=round(held[OPTIMIZER]),
        activations=round(kept),
        worst=worst,
        at_worst={kind: round(size) for kind, size in peaks[worst].items()},
        gathered=gathered[worst],
    )


def _trainable(skeleton: Skeleton, question: TrainingQuestion) -> nn.Module:
    """With the attention that training would use: torch's own where the architecture can, else transformers' eager."""
    dtype, cpu = question.weights_dtype, torch.device("cpu")
    try:
        module = build(skeleton.whole, dtype, cpu, "sdpa")
    except ValueError:
        module = build(skeleton.whole, dtype, cpu, "eager")
    module.train()
    if question.checkpointing:
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable()
    return module  # type: ignore[no-any-return]


def _forward(module: Any, question: TrainingQuestion) -> torch.Tensor:
    assert question.length is not None, "resolved before"
    ids = torch.zeros(question.batch_size, question.length, dtype=torch.int64)
    numbers: AbstractContextManager[Any] = nullcontext()
    if question.precision == "autocast":
        numbers = torch.autocast("cpu", torch.bfloat16)
    with numbers, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, on options that nobody here gave
        loss: torch.Tensor = module(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _optimizer(question: TrainingQuestion, module: nn.Module, parameters: list[nn.Parameter]) -> Any:
    """torch's own on the weights; None where it works on master weights, which are reckoned."""
    if question.precision == "mixed":
        return None
    if question.optimizer == "adamw":
        return torch.optim.AdamW(parameters, foreach=False)
    return torch.optim.SGD(parameters, foreach=False)


def _master(question: TrainingQuestion, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """In `mixed`: what the optimizer holds in float32."""
    if question.precision != "mixed":
        return []
    copies = 3 if question.optimizer == "adamw" else 1
    return [torch.empty(parameter.shape, dtype=torch.float32) for parameter in parameters for _ in range(copies)]


def _have_states(optimizer: Any, parameters: list[nn.Parameter], memory: LiveMemory) -> None:
    """As after the first step: an optimizer makes its states then."""
    if optimizer is None:
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    memory.name(OPTIMIZER, [value for value in states if isinstance(value, torch.Tensor)])


def _gathered(skeleton: Skeleton, question: TrainingQuestion) -> int:
    """One layer is used while the next is on its way."""
    if question.zero < 3 or question.data_parallel == 1:
        return 0
    largest = max(*(layer.number for layer in skeleton.layers), skeleton.embedding.number)
    return round(2 * largest * question.weights_dtype.itemsize * (1 - 1 / question.data_parallel))
