"""Minimum memory traffic and FLOPs of a step's forward pass, computed from the model's shape.

For a step of T tokens, S of which are sampled from, over sequences that begin at position a and compute n tokens each:

- Weights: all bytes as stored (quantized or not), once. The embedding table is excluded if it is not also the LM head,
  and the LM head if S = 0. With E experts and k used per token, the expected fraction 1 - (1 - k/E)^T of the experts is
  read.
- KV read: a + n tokens per sequence and layer, at most n - 1 + window. A sparse decode reads the tokens of the selected
  blocks, and the bounds of all blocks. KV written: n tokens.
- Other bytes: inputs and outputs of the linear layers, (4 hidden + 2 query + 2 KV + 3 intermediate) elements per token
  and layer, and S rows of float32 logits, written and read.
- FLOPs: 2 per weight and token in linear layers (the 2N of Kaplan et al., arXiv 2001.08361, section 2.1), 2 per weight
  of the LM head and sampled row, and 4 per element of a query head and attended pair of positions (query-key products,
  and the weighted sum of values). There are n a + n (n + 1) / 2 pairs, at most the window for each of the n tokens.

The roofline model is that of Williams, Waterman and Patterson (CACM 52-4, 2009). Repeated reads because of small caches
depend on the implementation and are not counted. Uses plans, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.telemetry import Work

_LOGIT_BYTES = 2 * 4


class LayerKind(NamedTuple):
    """Properties of a layer's attention that determine its work."""

    window: int
    """Maximum number of positions that a token attends to, including its own; 0 for all positions up to its own."""
    kv_bytes: int
    """Bytes of one token's keys and values in this layer."""
    flops_per_pair: int
    attended: Callable[[int], int] | None = None
    """Maps a context length to the number of tokens that one decode reads; None without sparse decode.

    It includes the bounds of all blocks, expressed in tokens of KV.
    """
    is_chunked: bool = False
    """Whether the text is divided into chunks of `window` tokens, and tokens attend only within their chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Sizes and FLOPs of a model from which `work_of_plan` computes the work of a step."""

    kinds: Mapping[LayerKind, int]
    """Number of layers of each kind."""
    weights_bytes: int
    """Bytes of weights that every step reads, without the LM head and the experts."""
    head_bytes: int = 0
    expert_bytes: int = 0
    expert_share: float = 1.0
    """Fraction of the experts that one token uses."""
    linear_flops: int = 0
    """FLOPs per token of all linear layers, without attention and the LM head."""
    head_flops: int = 0
    """FLOPs of the LM head per sampled row."""
    token_bytes: int = 0
    """Bytes of activations that linear layers read and write per token, over all layers."""
    vocab_size: int = 0
    streamed_bytes: int = 0
    """Bytes of weights that each step transfers from host memory."""

    def work_of_plan(self, plan: StepPlan) -> Work:
        if not plan.scheduled:
            return Work()
        # zip runs in C: there may be hundreds of sequences
        _, starts, counts, samples, drafts = zip(*plan.scheduled, strict=True)
        num_tokens, num_samples = sum(counts), sum(samples) + sum(map(len, drafts))
        decodes, chunks = starts[: plan.num_single_token], plan.scheduled[plan.num_single_token :]
        kv_read = kv_written = attention = 0
        for kind, num_layers in self.kinds.items():
            read, pairs = _read_and_pairs(decodes, chunks, kind)
            kv_read += num_layers * kind.kv_bytes * read
            kv_written += num_layers * kind.kv_bytes * num_tokens
            attention += num_layers * kind.flops_per_pair * pairs
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
        read = self.weights_bytes + (self.head_bytes if num_samples else 0)
        return read + round(self.expert_bytes * (1 - (1 - self.expert_share) ** num_tokens))


def _read_and_pairs(decodes: Sequence[int], chunks: Sequence[Scheduled], kind: LayerKind) -> tuple[int, int]:
    """Return the number of positions that one layer reads, and the number of (query, key) position pairs that it
    attends to.

    `decodes` are the start positions of single-token sequences.
    """
    window, attended = kind.window, kind.attended
    read = sum([attended(start + 1) for start in decodes]) if attended is not None else _positions_read(decodes, kind)
    pairs = read  # a decode has a single query, so that it attends to one pair per position read
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
        growing = min(max(window - start, 0), num)  # tokens whose window covers all positions before them
        pairs += growing * start + growing * (growing + 1) // 2 + (num - growing) * window
    return read, pairs


def _pairs_in_chunks(num_tokens: int, chunk: int) -> int:
    """Return the number of (query, key) pairs within attention chunks, over the first `num_tokens` tokens of a
    sequence.
    """
    whole, remainder = divmod(num_tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + remainder * (remainder + 1) // 2


def _positions_read(decodes: Sequence[int], kind: LayerKind) -> int:
    window = kind.window
    if kind.is_chunked:
        return sum([start % window + 1 for start in decodes])
    return sum([min(start + 1, window) for start in decodes]) if window else sum(decodes) + len(decodes)
