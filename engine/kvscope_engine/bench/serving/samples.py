"""What is asked: prompts of wanted lengths in the shapes that vLLM's benchmark client has, the same for the same seed.

Pure but for the codec. Tokens are drawn from those of a story, so that no prompt has special or broken ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from kvscope_engine.bench.serving.codec import Codec
from kvscope_engine.bench.workloads import sample_text
from kvscope_telemetry.errors import BadInput

_TRIES: Final = 12
"""To make a text of a wanted length: pieces put side by side may become other tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    prompt: str
    num_prompt_tokens: int
    """As the server counts them, special ones too."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Random:
    """`random`: lengths uniform from (1 - ratio) to (1 + ratio) times those given, behind a prefix that all share."""

    name: ClassVar = "random"
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def lengths(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        """Of prompts behind the prefix, and of answers."""
        inputs = self._drawn(rng, self.input_len, count)
        return list(zip(inputs, self._drawn(rng, self.output_len, count), strict=True))

    def _drawn(self, rng: np.random.Generator, length: int, count: int) -> list[int]:
        low, high = math.floor(length * (1 - self.range_ratio)), math.ceil(length * (1 + self.range_ratio))
        return [int(drawn) for drawn in rng.integers(max(1, low), max(1, high) + 1, count)]


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """`prefix_repetition`: a few prefixes, each shared by as many prompts, in mixed order."""

    name: ClassVar = "prefix_repetition"
    prefix_len: int
    suffix_len: int
    num_prefixes: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """`conversations`: short questions and longer answers with long tails, as people's are; log-normal lengths."""

    name: ClassVar = "conversations"
    input_median: int = 80
    output_median: int = 140
    sigma: float = 1.0
    shortest: int = 4
    longest: int = 1024

    def lengths(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        """Of prompts and of answers."""
        drawn = rng.lognormal(0.0, self.sigma, (count, 2)) * (self.input_median, self.output_median)
        return [(int(asked), int(told)) for asked, told in np.clip(drawn, self.shortest, self.longest)]


Dataset = Random | PrefixRepetition | Conversations


def samples(dataset: Dataset, codec: Codec, count: int, seed: int) -> list[Sample]:
    """`count` requests. Raises BadInput for prompts that cannot be as short as is asked."""
    rng = np.random.default_rng(seed)
    writer = _Writer(codec, rng)
    if isinstance(dataset, PrefixRepetition):
        prefixes = [writer.ids(dataset.prefix_len) for _ in range(dataset.num_prefixes)]
        order = rng.permutation(count) % dataset.num_prefixes
        return [writer.sample(prefixes[which], dataset.suffix_len, dataset.output_len) for which in order]
    prefix = writer.ids(dataset.prefix_len) if isinstance(dataset, Random) else []
    return [writer.sample(prefix, asked, told) for asked, told in dataset.lengths(rng, count)]


class _Writer:
    """Texts of a number of tokens."""

    def __init__(self, codec: Codec, rng: np.random.Generator) -> None:
        self._codec, self._rng = codec, rng
        self._known = sorted(set(codec.encode(sample_text())))
        if not self._known:
            raise BadInput("the tokenizer makes no tokens of a text: there is nothing to write prompts with")

    def ids(self, count: int) -> list[int]:
        """Drawn at random."""
        return [self._known[drawn] for drawn in self._rng.integers(0, len(self._known), count)]

    def sample(self, prefix: Sequence[int], length: int, max_tokens: int) -> Sample:
        """Its own tokens behind `prefix`, together as many as both are; special ones count."""
        wanted = max(1, len(prefix) + length - self._codec.num_special)
        text, count = self._text([*prefix, *self.ids(max(0, wanted - len(prefix)))], wanted)
        return Sample(text, count + self._codec.num_special, max_tokens)

    def _text(self, ids: list[int], wanted: int) -> tuple[str, int]:
        """A text of `wanted` tokens where one is found, and how many it has; as it is made, its beginning stays."""
        for _ in range(_TRIES):
            text = self._codec.decode(ids)
            found = self._codec.encode(text)
            if len(found) == wanted:
                break
            ids = found[:wanted] if len(found) > wanted else found + self.ids(wanted - len(found))
        return text, len(found)
