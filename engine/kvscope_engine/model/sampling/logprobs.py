"""Log-probabilities of the model's own distribution: before temperature, penalties and filters, as vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvscope_telemetry.messages.commands import TokenLogprobs

if TYPE_CHECKING:
    from kvscope_engine.model.sampling.sampling_inputs import LogprobInputs


class RawLogprobs:
    """Those of the rows that ask for them, taken from the logits before anything changes these."""

    def __init__(self, logits: torch.Tensor, inputs: LogprobInputs) -> None:
        self._inputs = inputs
        self._values = logits.index_select(0, inputs.where).log_softmax(-1)

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
