"""What the forward pass of a step has to move and to compute at least, reckoned from the model's shape.

For a step of T tokens, S of which are sampled from, over sequences that begin at a and compute n tokens each:

- weights: all bytes as they lie in memory (packed ones too) once, without the table of embeddings where the head has
  weights of its own, without the head where S = 0, and of E experts of which each token takes k the share
  1 - (1 - k/E)^T that is expected to be touched;
- KV read: a + n tokens of each sequence in each layer, n - 1 + window at most; written: n; of a decode that chooses
  among blocks, the tokens of those that it attends to, and the bounds of all;
- others: what each linear layer takes and gives, (4 hidden + 2 query + 2 KV + 3 intermediate) numbers a token and
  layer, and S rows of float32 logits, written and read;
- FLOPs: 2 a weight and token in linear layers (the 2N of Kaplan et al., arXiv 2001.08361, section 2.1), 2 a weight of
  the head and sampled row, and 4 a query head's number and attended pair of positions: queries with keys, and the
  weighted sum of values. Pairs are n a + n (n + 1) / 2, no more than the window for each of the n.

The roofline that this is for is that of Williams, Waterman and Patterson (CACM 52-4, 2009). What is read again, because
a cache was too small, is the implementation's and not counted. Reads plans, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvscope_engine.policy.plan import Scheduled, StepPlan
from kvscope_telemetry.messages.telemetry import Work

_LOGIT_BYTES = 2 * 4


class LayerKind(NamedTuple):
    """Attention of one layer."""

    window: int
    """Positions that a token sees, itself included; 0: all before it."""
    kv_bytes: int
    """Of one token's keys and values."""
    flops_per_pair: int
    attended: Callable[[int], int] | None = None
    """Where decodes choose among blocks: the tokens' worth of KV that one reads of so many."""
    is_chunked: bool = False
    """The text is cut into windows, and a token sees none before its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What the work of a step is reckoned from, and `of`, which does it."""

    kinds: Mapping[LayerKind, int]
    """How many layers there are of each."""
    weights_bytes: int
    """That every step reads; the next two come on top of it."""
    head_bytes: int = 0
    expert_bytes: int = 0
    expert_share: float = 1.0
    """Of the experts, what one token takes."""
    linear_flops: int = 0
    """A token, without attention and head."""
    head_flops: int = 0
    """A sampled row."""
    token_bytes: int = 0
    """Activations of a token, in all layers."""
    vocab_size: int = 0
    streamed_bytes: int = 0
    """Of the weights, what comes from host memory each time."""

    def of(self, plan: StepPlan) -> Work:
        """The work of a step; how it ran is not in it."""
        if not plan.scheduled:
            return Work()
        _, starts, nums, samples, drafts = zip(*plan.scheduled, strict=True)  # in C: there may be hundreds
        num_tokens, num_samples = sum(nums), sum(samples) + sum(map(len, drafts))
        decodes, chunks = starts[: plan.num_single_token], plan.scheduled[plan.num_single_token :]
        kv_read = kv_written = attention = 0
        for kind, count in self.kinds.items():
            read, pairs = _attended(decodes, chunks, kind)
            kv_read += count * kind.kv_bytes * read
            kv_written += count * kind.kv_bytes * num_tokens
            attention += count * kind.flops_per_pair * pairs
        return Work(
            flops=num_tokens * self.linear_flops + num_samples * self.head_flops + attention,
            attention_flops=attention,
            weights_bytes=self.weights_read(num_tokens, num_samples),
            kv_read_bytes=kv_read,
            kv_written_bytes=kv_written,
            other_bytes=num_tokens * self.token_bytes + num_samples * self.vocab_size * _LOGIT_BYTES,
            streamed_bytes=self.streamed_bytes,
        )

    def weights_read(self, num_tokens: int, num_samples: int) -> int:
        """Bytes of weights that a step reads."""
        read = self.weights_bytes + (self.head_bytes if num_samples else 0)
        return read + round(self.expert_bytes * (1 - (1 - self.expert_share) ** num_tokens))


def _attended(decodes: Sequence[int], chunks: Sequence[Scheduled], kind: LayerKind) -> tuple[int, int]:
    """Positions that are read, and pairs of positions: `decodes` are the positions of those that decode."""
    window, attended = kind.window, kind.attended
    read = sum([attended(start + 1) for start in decodes]) if attended is not None else _seen(decodes, kind)
    pairs = read
    for item in chunks:
        start, num = item.start, item.num_tokens
        end = start + num
        if not window:
            read += end
            pairs += num * start + num * (num + 1) // 2
            continue
        if kind.is_chunked:
            read += end - start // window * window
            pairs += _pairs_in_chunks(end, window) - _pairs_in_chunks(start, window)
            continue
        read += min(end, window + num - 1)
        growing = min(max(window - start, 0), num)  # tokens that see all before them
        pairs += growing * start + growing * (growing + 1) // 2 + (num - growing) * window
    return read, pairs


def _pairs_in_chunks(num_tokens: int, chunk: int) -> int:
    """Of a text's first tokens."""
    whole, rest = divmod(num_tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def _seen(decodes: Sequence[int], kind: LayerKind) -> int:
    window = kind.window
    if kind.is_chunked:
        return sum([start % window + 1 for start in decodes])
    return sum([min(start + 1, window) for start in decodes]) if window else sum(decodes) + len(decodes)
