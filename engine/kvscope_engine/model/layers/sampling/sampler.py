"""Samples one token per row of logits, for a whole batch.

Decides the order of operations: biases, penalties, structured output, then a draw with temperature, filters and the
row's own random numbers (`draw_tokens` of the kernels). A request's token depends on its own logits, options, seed and
position, never on the rest of the batch. Must not depend on the model. Copies nothing to the host: sampled tokens stay
on the device for the next step, and the caller copies them.
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
    tokens: torch.Tensor
    """Sampled tokens on the device, shape (num_rows,), int64."""
    packed: torch.Tensor
    """Vector to be copied to the host: the tokens, followed by a table of log-probabilities (both float64) if
    requested.
    """
    logprobs: LogprobInputs | None
    num_top: int

    def read(self, numbers: list[int] | list[float]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Convert the numbers of `packed`, which were copied to the host, to one token per row, and
        log-probabilities (empty if none were requested).
        """
        if self.logprobs is None:
            return list(map(int, numbers)), []
        return unpack(numbers, len(self.tokens), self.logprobs, self.num_top)


class Sampler:
    """Samples one token for each row of logits. The only state is cached penalty counts and biases of requests."""

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
        """Write the inputs of `draw` to `buffer`.

        Args:
            vocab_size: Number of columns of the logits; None for the model's vocabulary.
            num_output_tokens: Number of output tokens before the sampled one, for each request. None for the number
                known on the host, which is lower if a token is still in flight.
        """
        width = vocab_size or self._vocab_size
        num_known = (
            [len(request.output_token_ids) for request in requests] if num_output_tokens is None else num_output_tokens
        )
        return sampling_inputs(requests, num_known, self._eos, width, self._penalties, self._biases, buffer)

    def forget(self, request: Request) -> None:
        self._penalties.forget(request)
        self._biases.forget(request)

    def draw(self, logits: torch.Tensor, inputs: SamplingInputs) -> SamplerOutput:
        """Sample a token per request from logits (num_requests, vocabulary), which may be overwritten."""
        logits = logits.float()
        assert logits.shape[1] == inputs.vocab_size, f"logits of {inputs.vocab_size} tokens: {tuple(logits.shape)}"
        raw = RawLogprobs(logits, inputs.logprobs) if inputs.logprobs is not None else None
        if inputs.biases is not None:
            apply_biases(logits, inputs.biases)
        if inputs.penalties is not None:
            apply_penalties(logits, inputs.penalties)
        if inputs.forbidden is not None:
            logits.view(-1).index_fill_(0, inputs.forbidden, -torch.inf)
        if inputs.grammars is not None:
            self._ops.allow_tokens(logits, inputs.grammars.rows, inputs.grammars.allowed)
        tokens = self._tokens(logits, inputs.draw)
        if raw is None:
            return SamplerOutput(tokens, tokens, None, 0)
        return SamplerOutput(tokens, raw.pack(tokens), inputs.logprobs, raw.num_top)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Run `inputs`, `draw` and `read` for logits on a CPU, without the buffer of a step."""
        sampled = self.draw(logits, self.inputs(requests, StepBuffer(logits.device, 0), logits.shape[1]))
        return sampled.read(sampled.packed.tolist())

    def _tokens(self, logits: torch.Tensor, inputs: DrawInputs | None) -> torch.Tensor:
        if inputs is None:
            return first_largest(logits)
        largest = None if len(inputs.rows) == len(logits) else first_largest(logits)
        drawn = self._ops.draw_tokens(logits, inputs.options, inputs.keys, inputs.rows)
        return drawn if largest is None else largest.index_copy_(0, inputs.rows, drawn)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest value of each row, the first if several are equal: (n, size) -> (n,).

    Works in pieces, which on a CPU is several times as fast as torch's `argmax`.
    """
    pieces = in_pieces(values, -torch.inf)
    piece = pieces.amax(-1).argmax(-1)
    rows = torch.arange(len(values), device=values.device)
    return piece * PIECE + pieces[rows, piece].argmax(-1)


class RawLogprobs:
    """Log-probabilities of the model's distribution before temperature, penalties and filters, as in vLLM.

    The logits of rows whose request asks for log-probabilities are copied before sampling changes them.
    """

    def __init__(self, logits: torch.Tensor, inputs: LogprobInputs) -> None:
        self._inputs = inputs
        values, width = logits.index_select(0, inputs.row_indices), logits.shape[1]
        if width % 4:  # the order of a GPU's sums depends on a row's 16-byte alignment: align all
            values = pad(values, (0, -width % 4), value=-torch.inf)
        self._values = values.log_softmax(-1)[:, :width]

    @property
    def num_top(self) -> int:
        """Number of top tokens per row in the table that `pack` returns."""
        return min(max(self._inputs.counts), self._values.shape[1])

    def pack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sampled `tokens` and a table of log-probabilities as one vector, so that one copy to the host
        suffices.

        The table has, per requested row: the log-probability of the sampled token, the top token ids, and their
        log-probabilities. float64 represents ids and float32 exactly.
        """
        own = self._values.gather(-1, tokens.index_select(0, self._inputs.row_indices)[:, None])
        largest = self._values.topk(self.num_top)
        table = torch.cat((own.double(), largest.indices.double(), largest.values.double()), 1)
        return torch.cat((tokens.double(), table.view(-1)))


def unpack(
    numbers: Sequence[float], num_rows: int, inputs: LogprobInputs, num_top: int
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Convert the vector of `RawLogprobs.pack`, copied to the host, to tokens and log-probabilities, one entry per row
    (None if the row did not request them).
    """
    token_ids, table = [int(number) for number in numbers[:num_rows]], numbers[num_rows:]
    entries: list[TokenLogprobs | None] = [None] * num_rows
    width = 1 + 2 * num_top
    for index, (row, count) in enumerate(zip(inputs.rows, inputs.counts, strict=True)):
        logprob, *top = table[index * width : (index + 1) * width]
        pairs = zip(map(int, top[: min(count, num_top)]), top[num_top:], strict=False)
        entries[row] = TokenLogprobs(token_id=token_ids[row], logprob=logprob, top=tuple(pairs))
    return token_ids, entries
