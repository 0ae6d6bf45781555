"""Memory that training a model takes on each GPU: one training step is run on tensors without data, and its memory is
divided among the GPUs as by ZeRO.

Weights, gradients and the optimizer's states are counted as torch creates them. Activations are the tensors that
autograd retains from transformers' own forward pass, and the loss's float32 logits. The result is the maximum over the
forward pass, the backward pass and the optimizer's step. Sources:

- `mixed`: 16-bit weights and gradients, plus float32 master weights and Adam's two moments, 2 + 2 + 12 bytes per
  parameter: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 3.1.
- ZeRO's stages divide among N data-parallel ranks: 1 the optimizer's states, 2 also gradients, 3 also weights, where
  each rank gathers one layer at a time: the same paper, section 5 and figure 1.
- Gradient checkpointing keeps each layer's input and recomputes the rest: Chen et al. 2016, arXiv:1604.06174.
- GPT's layers with dropout retain s*b*h*(34 + 5*a*s/h) bytes per layer without checkpointing: Korthikanti et al. 2022,
  arXiv:2205.05198, equation 2. Not used here, because today's layers differ.
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
from kvscope_engine.planning.inference_plan import CONTEXT_BYTES
from kvscope_engine.planning.live_memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS, LiveMemory
from kvscope_engine.planning.skeleton import Skeleton, build_model
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

PRECISIONS: Final = ("mixed", "autocast", "bfloat16", "float32")
OPTIMIZERS: Final = ("adamw", "sgd")
MASTER_BYTES: Final = 12
"""Bytes per parameter in addition to 16-bit weights and gradients in `mixed`: a float32 copy and Adam's two moments.

Without Adam it is only the copy: 4 bytes.
"""
ZERO_STAGES: Final = (0, 1, 2, 3)
DEFAULT_LENGTH: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingQuestion:
    batch_size: int = 1
    """Sequences per forward pass on each GPU (micro batch)."""
    length: int | None = None
    """Number of tokens per sequence; None for 2,048, or the model's maximum if that is less."""
    precision: str = "mixed"
    """Data types: one of `mixed`, `autocast`, `bfloat16` and `float32`.

    `mixed` has 16-bit weights with float32 master weights; `autocast` is torch's, with float32 weights and matmuls in
    bfloat16; the others use one type for everything.
    """
    optimizer: str = "adamw"
    checkpointing: bool = False
    zero: int = 0
    """ZeRO stage, 1 to 3; 0 for training without ZeRO."""
    data_parallel: int = 1
    """Number of data-parallel ranks, among which ZeRO divides the training state."""

    def __post_init__(self) -> None:
        for name, accepted in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("zero", ZERO_STAGES)):
            if getattr(self, name) not in accepted:
                choices = ", ".join(map(str, accepted))
                raise BadInput(f"{name}={getattr(self, name)!r} is not accepted: must be one of {choices}")
        for name, maximum in (("batch_size", 1 << 16), ("length", 1 << 22), ("data_parallel", 1 << 20)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= maximum:
                raise BadInput(f"{name}={value} is not accepted: must be a whole number from 1 to {maximum}")

    @property
    def weights_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision in ("autocast", "float32") else torch.bfloat16

    @property
    def shares(self) -> Mapping[str, float]:
        """Fraction of each kind of memory (weights, gradients, ...) that one rank stores; missing kinds are
        stored whole.
        """
        part = 1.0 / self.data_parallel
        return {
            OPTIMIZER: part if self.zero >= 1 else 1.0,
            GRADIENTS: part if self.zero >= 2 else 1.0,
            WEIGHTS: part if self.zero >= 3 else 1.0,
        }


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Memory in bytes on one GPU, at the moment of a training step when most is in use."""

    question: TrainingQuestion
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Bytes that the forward pass retains for the backward pass, and the loss."""
    peak_phase: str
    """Phase of the step in which most memory is in use: "forward", "backward" or "optimizer"."""
    at_peak: Mapping[str, int]
    gathered: int
    """Bytes of weights that ZeRO stage 3 has gathered at the moment of peak memory: twice the largest layer."""
    others: int = CONTEXT_BYTES

    @property
    def temporary(self) -> int:
        """Bytes of activations at peak memory that the forward pass did not retain: results of operations that
        run then.
        """
        return max(0, self.at_peak[ACTIVATIONS] - self.activations)

    @property
    def peak(self) -> int:
        """Peak bytes of all kinds of memory, including `gathered`."""
        return sum(self.at_peak.values()) + self.gathered

    @property
    def needed(self) -> int:
        return self.peak + self.others


def plan_training(skeleton: Skeleton, question: TrainingQuestion) -> TrainingPlan:
    """Plan a training step by running it on tensors without data.

    Raises BadInput if the model does not support the length, or its code cannot run without data.
    """
    question = replace(question, length=_checked_length(skeleton, question.length))
    try:
        with FakeTensorMode():
            return measure_step(skeleton, question)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # external model code may raise these
        line = " ".join(str(error).split())
        raise BadInput(
            f"training of model {skeleton.name!r} cannot be planned: {type(error).__name__}: {line:.200}"
        ) from error


def _checked_length(skeleton: Skeleton, length: int | None) -> int:
    limit = position_limit(skeleton.config)
    if length is None:
        return min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise BadInput(f"length={length} is not accepted: model {skeleton.name!r} can do {limit}")
    return length


def measure_step(skeleton: Skeleton, question: TrainingQuestion) -> TrainingPlan:
    """Build the model, train one step, and return its memory. Runs on a CPU, or without data in the caller's fake
    tensor mode.
    """
    module = _build_trainable_model(skeleton, question)
    parameters = list(module.parameters())
    memory = LiveMemory(question.shares)
    peaks: dict[str, dict[str, float]] = {}
    with memory:
        memory.assign(WEIGHTS, [*parameters, *module.buffers()])
        optimizer = _optimizer(question, module, parameters)
        master = _master_weights(question, parameters)
        memory.assign(OPTIMIZER, master)
        for parameter in parameters:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(lambda p: memory.assign(GRADIENTS, [p.grad]))
        _create_optimizer_states(optimizer, parameters, memory)
        memory.reset_peak()
        loss = _forward(module, question)
        retained = memory.live_bytes[ACTIVATIONS]
        peaks["forward"] = memory.peak
        memory.reset_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        peaks["backward"] = memory.peak
        memory.reset_peak()
        gradients = memory.live_bytes[GRADIENTS]
        if optimizer is not None:
            optimizer.step()
        peaks["optimizer"] = memory.peak
    gathered = {name: 0 if name == "optimizer" else _gathered_bytes(skeleton, question) for name in peaks}
    worst = max(peaks, key=lambda name: sum(peaks[name].values()) + gathered[name])
    final_bytes = memory.live_bytes
    return TrainingPlan(
        question=question,
        weights=round(final_bytes[WEIGHTS]),
        gradients=round(gradients),
        optimizer=round(final_bytes[OPTIMIZER]),
        activations=round(retained),
        peak_phase=worst,
        at_peak={kind: round(size) for kind, size in peaks[worst].items()},
        gathered=gathered[worst],
    )


def _build_trainable_model(skeleton: Skeleton, question: TrainingQuestion) -> nn.Module:
    """Return the model with the attention that training would use: torch's SDPA if the model supports it, else
    eager.
    """
    dtype, cpu = question.weights_dtype, torch.device("cpu")
    try:
        module = build_model(skeleton.whole, dtype, cpu, "sdpa")
    except ValueError:
        module = build_model(skeleton.whole, dtype, cpu, "eager")
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
    autocast: AbstractContextManager[Any] = nullcontext()
    if question.precision == "autocast":
        autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about options that are not set here
        loss: torch.Tensor = module(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _optimizer(question: TrainingQuestion, module: nn.Module, parameters: list[nn.Parameter]) -> Any:
    """Return torch's optimizer for the weights. Returns None in `mixed`, where `_master_weights` models its memory."""
    if question.precision == "mixed":
        return None
    if question.optimizer == "adamw":
        return torch.optim.AdamW(parameters, foreach=False)
    return torch.optim.SGD(parameters, foreach=False)


def _master_weights(question: TrainingQuestion, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the float32 tensors that the optimizer stores in `mixed`; empty for other precisions."""
    if question.precision != "mixed":
        return []
    copies = 3 if question.optimizer == "adamw" else 1
    return [torch.empty(parameter.shape, dtype=torch.float32) for parameter in parameters for _ in range(copies)]


def _create_optimizer_states(optimizer: Any, parameters: list[nn.Parameter], memory: LiveMemory) -> None:
    """Run an optimizer step, because optimizers create their states in their first step."""
    if optimizer is None:
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    memory.assign(OPTIMIZER, [value for value in states if isinstance(value, torch.Tensor)])


def _gathered_bytes(skeleton: Skeleton, question: TrainingQuestion) -> int:
    """Return the bytes of gathered weights: those of the layer in use and of the next layer, which is being fetched."""
    if question.zero < 3 or question.data_parallel == 1:
        return 0
    largest = max(*(layer.total for layer in skeleton.layers), skeleton.embedding.total)
    return round(2 * largest * question.weights_dtype.itemsize * (1 - 1 / question.data_parallel))
