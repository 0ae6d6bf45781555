"""Prompts have the lengths that were asked for, counted after tokenizing their text; the same for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvscope_engine.bench.serving.codec import Words
from kvscope_engine.bench.serving.samples import Conversations, PrefixRepetition, Random, Sample, samples
from kvscope_engine.bench.workloads import sample_text


class Own:
    """A tokenizer whose pieces join when they come together, and special tokens before each prompt if asked."""

    name = "own"
    is_exact = True

    def __init__(self, backend: Tokenizer, num_special: int = 0) -> None:
        self._backend = backend
        self.num_special = num_special

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids)))


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    made.train_from_iterator([sample_text()], trainer)
    return made


@pytest.fixture
def own(backend: Tokenizer) -> Own:
    return Own(backend)


def lengths(codec: Own, made: list[Sample]) -> list[int]:
    found = [len(codec.encode(sample.prompt)) + codec.num_special for sample in made]
    assert found == [sample.num_prompt_tokens for sample in made]
    return found


def test_random_has_its_lengths(own: Own) -> None:
    made = samples(Random(40, 7), own, 20, 0)
    assert lengths(own, made) == [40] * 20
    assert {sample.max_tokens for sample in made} == {7}
    assert len({sample.prompt for sample in made}) == 20


def test_special_tokens_are_part_of_a_prompt(backend: Tokenizer) -> None:
    own = Own(backend, 2)
    assert lengths(own, samples(Random(10, 1), own, 5, 0)) == [10] * 5


def test_random_lengths_are_in_their_range(own: Own) -> None:
    made = samples(Random(20, 10, range_ratio=0.5), own, 200, 0)
    found = lengths(own, made)
    assert min(found) == 10
    assert max(found) == 30
    assert {sample.max_tokens for sample in made} == set(range(5, 16))


def test_random_prompts_share_their_prefix() -> None:
    made = samples(Random(5, 1, prefix_len=30), Words(), 10, 0)
    assert len({tuple(sample.prompt.split()[:30]) for sample in made}) == 1
    assert len({tuple(sample.prompt.split()[30:]) for sample in made}) == 10
    assert {sample.num_prompt_tokens for sample in made} == {35}


def test_prefixes_are_shared_by_as_many_each(own: Own) -> None:
    made = samples(PrefixRepetition(32, 8, 4, 3), own, 40, 0)
    assert set(lengths(own, made)) == {40}
    starts = Counter(sample.prompt[:32] for sample in made)
    assert sorted(starts.values()) == [10, 10, 10, 10]
    assert len({sample.prompt for sample in made}) == 40


def test_conversations_have_long_tails() -> None:
    made = Conversations().lengths(np.random.default_rng(0), 4000)
    prompts = sorted(asked for asked, _ in made)
    assert 70 < prompts[2000] < 90
    assert prompts[0] >= 4
    assert prompts[-1] == 1024
    assert prompts[3600] > 3 * prompts[2000]


@pytest.mark.parametrize("dataset", [Random(12, 4, 0.5, 3), PrefixRepetition(8, 4, 3, 5), Conversations(6, 4)])
def test_a_seed_is_a_workload(dataset: Any) -> None:
    words = Words()
    assert samples(dataset, words, 12, 5) == samples(dataset, words, 12, 5)
    assert samples(dataset, words, 12, 5) != samples(dataset, words, 12, 6)
