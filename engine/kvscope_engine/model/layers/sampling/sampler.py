"""From logits to tokens, for a whole batch at once.

Owns the order of sampling: biases, penalties, forms, and a draw by temperature, filters and the row's own random
numbers (`draw_tokens` of the kernels). A request's token depends on its own logits, options, seed and position, never
on the rest of the batch. Knows no model. Nothing is read back here: what is drawn stays on the device, for the next
step and for whoever brings it down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.layers.sampling.logit_bias import LogitBiases, apply_biases
from kvscope_engine.model.layers.sampling.penalties import Penalties, apply_penalties
from kvscope_engine.model.layers.sampling.sampling_inputs import (
    DrawInputs,
    LogprobInputs,
    SamplingInputs,
    sampling_inputs,
)
from kvscope_engine.policy.request import Request
from kvscope_kernels import Ops
from kvscope_kernels.logits.token_filter import PIECE, in_pieces
from kvscope_telemetry.messages.commands import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was drawn, on the device."""

    tokens: torch.Tensor
    """(num_rows,) int64."""
    packed: torch.Tensor
    """What the host wants to know, one vector: the tokens, in float64 with log-probabilities behind them."""
    logprobs: LogprobInputs | None
    num_top: int

    def read(self, numbers: list[int] | list[float]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """`packed` on the host -> a token a row, and log-probabilities: empty when none are asked."""
        if self.logprobs is None:
            return list(map(int, numbers)), []
        return unpack(numbers, len(self.tokens), self.logprobs, self.num_top)


class Sampler:
    """Samples one token for each row of logits. Keeps only what penalties have counted, and biases as arrays."""

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int, ops: Ops) -> None:
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._vocab_size = vocab_size
        self._ops = ops
        self._penalties = Penalties()
        self._biases = LogitBiases()

    def inputs(
        self,
        requests: Sequence[Request],
        buffer: StepBuffer,
        vocab_size: int | None = None,
        num_output_tokens: Sequence[int] | None = None,
    ) -> SamplingInputs:
        """What `draw` needs of the requests, put into `buffer`. `vocab_size` is that of the logits.

        `num_output_tokens`: output tokens of each before this one, where some are still on their way; None: those
        that it knows.
        """
        width = vocab_size or self._vocab_size
        said = (
            [len(request.output_token_ids) for request in requests] if num_output_tokens is None else num_output_tokens
        )
        return sampling_inputs(requests, said, self._eos, width, self._penalties, self._biases, buffer)

    def forget(self, request: Request) -> None:
        """Whatever is kept of it."""
        self._penalties.forget(request)
        self._biases.forget(request)

    def draw(self, logits: torch.Tensor, inputs: SamplingInputs) -> SamplerOutput:
        """logits (num_requests, vocabulary) -> a token a request. `logits` may be changed."""
        logits = logits.float()
        assert logits.shape[1] == inputs.vocab_size, f"logits of {inputs.vocab_size} tokens: {tuple(logits.shape)}"
        raw = RawLogprobs(logits, inputs.logprobs) if inputs.logprobs is not None else None
        if inputs.biases is not None:
            apply_biases(logits, inputs.biases)
        if inputs.penalties is not None:
            apply_penalties(logits, inputs.penalties)
        if inputs.forbidden is not None:
            logits.view(-1).index_fill_(0, inputs.forbidden, -torch.inf)
        if inputs.forms is not None:
            self._ops.allow_tokens(logits, inputs.forms.rows, inputs.forms.allowed)
        tokens = self._tokens(logits, inputs.draw)
        if raw is None:
            return SamplerOutput(tokens, tokens, None, 0)
        return SamplerOutput(tokens, raw.pack(tokens), inputs.logprobs, raw.num_top)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The same where no step's buffer is at hand, for logits on a CPU, and read."""
        sampled = self.draw(logits, self.inputs(requests, StepBuffer(logits.device, 0), logits.shape[1]))
        return sampled.read(sampled.packed.tolist())

    def _tokens(self, logits: torch.Tensor, inputs: DrawInputs | None) -> torch.Tensor:
        if inputs is None:
            return first_largest(logits)
        largest = None if len(inputs.rows) == len(logits) else first_largest(logits)
        drawn = self._ops.draw_tokens(logits, inputs.options, inputs.keys, inputs.rows)
        return drawn if largest is None else largest.index_copy_(0, inputs.rows, drawn)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """(n, size) -> (n,): index of the largest, the first of equals. In pieces, several times as fast on a CPU as
    torch's own `argmax`."""
    pieces = in_pieces(values, -torch.inf)
    piece = pieces.amax(-1).argmax(-1)
    rows = torch.arange(len(values), device=values.device)
    return piece * PIECE + pieces[rows, piece].argmax(-1)


class RawLogprobs:
    """Log-probabilities of the model's own distribution: before temperature, penalties and filters, as vLLM gives them.

    Those of the rows that ask for them, taken from the logits before anything changes these.
    """

    def __init__(self, logits: torch.Tensor, inputs: LogprobInputs) -> None:
        self._inputs = inputs
        values, width = logits.index_select(0, inputs.where), logits.shape[1]
        if width % 4:  # a GPU adds by where in 16 bytes a row begins: all begin alike
            values = pad(values, (0, -width % 4), value=-torch.inf)
        self._values = values.log_softmax(-1)[:, :width]

    @property
    def num_top(self) -> int:
        """How many of the largest `pack` gives of each row."""
        return min(max(self._inputs.counts), self._values.shape[1])

    def pack(self, tokens: torch.Tensor) -> torch.Tensor:
        """The sampled `tokens` and a table behind them, as one vector: all comes down at once.

        Of each row that asks its own token's number, the ids of the largest, theirs. float64 holds ids and float32
        exactly.
        """
        own = self._values.gather(-1, tokens.index_select(0, self._inputs.where)[:, None])
        largest = self._values.topk(self.num_top)
        table = torch.cat((own.double(), largest.indices.double(), largest.values.double()), 1)
        return torch.cat((tokens.double(), table.view(-1)))


def unpack(
    numbers: Sequence[float], num_rows: int, inputs: LogprobInputs, num_top: int
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """What `RawLogprobs.pack` gave, on the host: the tokens, and one entry a row, None where none is asked for."""
    token_ids, table = [int(number) for number in numbers[:num_rows]], numbers[num_rows:]
    found: list[TokenLogprobs | None] = [None] * num_rows
    width = 1 + 2 * num_top
    for index, (row, count) in enumerate(zip(inputs.rows, inputs.counts, strict=True)):
        own, *rest = table[index * width : (index + 1) * width]
        pairs = zip(map(int, rest[: min(count, num_top)]), rest[num_top:], strict=False)
        found[row] = TokenLogprobs(token_id=token_ids[row], logprob=own, top=tuple(pairs))
    return token_ids, found
