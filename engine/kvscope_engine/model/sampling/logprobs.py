"""Log-probabilities of the model's own distribution: before temperature, penalties and filters, as vLLM gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvscope_engine.model.running.step_buffer import read_back
from kvscope_telemetry.messages.commands import TokenLogprobs

if TYPE_CHECKING:
    from kvscope_engine.model.sampling.sampling_inputs import LogprobInputs


class RawLogprobs:
    """Those of the rows that ask for them, taken from the logits before anything changes these."""

    def __init__(self, logits: torch.Tensor, inputs: LogprobInputs) -> None:
        self._inputs = inputs
        self._values = logits.index_select(0, inputs.where).log_softmax(-1)

    def read(self, tokens: torch.Tensor, num_rows: int) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The tokens on the host, and one entry a row, None where none is asked for. All comes down at once."""
        size = min(max(self._inputs.counts), self._values.shape[1])
        own = self._values.gather(-1, tokens.index_select(0, self._inputs.where)[:, None])
        largest = self._values.topk(size)
        table = torch.cat((own.double(), largest.indices.double(), largest.values.double()), 1)
        numbers = read_back(torch.cat((tokens.double(), table.view(-1))))  # float64 holds token ids and float32 exactly
        token_ids = [int(number) for number in numbers[:num_rows]]
        return token_ids, self._entries(token_ids, numbers[num_rows:], size)

    def _entries(self, token_ids: list[int], table: list[float], size: int) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(token_ids)
        width = 1 + 2 * size
        for index, (row, count) in enumerate(zip(self._inputs.rows, self._inputs.counts, strict=True)):
            own, *rest = table[index * width : (index + 1) * width]
            pairs = zip(map(int, rest[: min(count, size)]), rest[size:], strict=False)
            found[row] = TokenLogprobs(token_id=token_ids[row], logprob=own, top=tuple(pairs))
        return found
