"""Sampled tokens have the weights that the filters leave: compared with float64 and between implementations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvscope_kernels.logits.draw_tokens import draw_tokens_torch
from kvscope_kernels.logits.random_numbers import exponentials

PIECE = 256
OPTIONS = [  # temperature, top-k, top-p and min-p
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 0.9, 0.0),
    (0.7, 20, 0.9, 0.01),
    (1.0, 1, 1.0, 0.0),
    (2.0, 100, 0.5, 0.0),
    (1.0, 0, 1.0, 0.05),
    (8.0, 0, 0.95, 0.02),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 5000000, 1.0, 0.0),
    (20.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1e-5, 0, 0.5, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.3, 40, 1.0, 0.0),
    (0.9, 700, 0.8, 0.001),
]


def kept_by_definition(row: Tensor, option: tuple[float, float, float, float]) -> tuple[Tensor, Tensor]:
    """Return (vocabulary,) float64 weights of a row without dropped tokens, and whether the last bits of a sum
    decide.
    """
    temperature, top_k, top_p, min_p = option
    scores = row.double() / temperature
    weights = (scores - scores.max()).exp()
    weights = torch.where(weights < min_p, 0.0, weights)
    if 0 < top_k < len(row):
        weights = torch.where(row < row.sort(descending=True).values[int(top_k) - 1], 0.0, weights)
    if top_p < 1.0:
        order = (-row.double()).argsort(stable=True)
        cumulative = weights[order].cumsum(0)
        wanted = top_p * cumulative[-1]
        last = int((cumulative < wanted * (1 - 1e-6)).sum())
        close = int((cumulative < wanted * (1 + 1e-6)).sum())
        is_close = close != last
        weights = torch.where(row < row[order[min(last, len(row) - 1)]], 0.0, weights)
        return weights, torch.tensor(is_close)
    return weights, torch.tensor(False)


def drawn_by_definition(weights: Tensor, key: Tensor) -> int:
    """Return the token that wins the race in float64."""
    num_pieces = -(-len(weights) // PIECE)
    padded = torch.zeros(num_pieces * PIECE, dtype=torch.float64)
    padded[: len(weights)] = weights
    times = exponentials(key[None], num_pieces + PIECE)[0]
    piece = int((padded.view(-1, PIECE).sum(1) / times[:num_pieces]).argmax())
    return piece * PIECE + int((padded.view(-1, PIECE)[piece] / times[num_pieces:]).argmax())


def random_keys(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


def draw(runner: Any, logits: Tensor, options: list[Any], keys: Tensor, rows: Tensor) -> list[int]:
    """Return the tokens of the operation; rows that are not drawn are poisoned."""
    poisoned = torch.full_like(logits, torch.nan)
    poisoned[rows] = logits[rows]
    given = (poisoned, torch.tensor(options, dtype=torch.float64), keys, rows)
    found: list[int] = runner.ops.draw_tokens(*(tensor.to(runner.device) for tensor in given)).tolist()
    return found


@pytest.mark.parametrize(
    ("vocabulary", "spread"), [(1, 1.0), (5, 4.0), (256, 0.5), (257, 4.0), (4099, 0.5), (17000, 4.0)]
)
def test_sampled_tokens_equal_the_definition_for_every_sampling_option(
    runner: Any, vocabulary: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    count = len(OPTIONS)
    logits = torch.randn(count + 2, vocabulary, generator=generator) * spread
    rows = torch.randperm(count + 2, generator=generator)[:count]
    keys = random_keys(count, generator)
    found = draw(runner, logits, OPTIONS, keys, rows)
    num_compared = 0
    for place, (row, option) in enumerate(zip(logits[rows], OPTIONS, strict=True)):
        weights, is_close = kept_by_definition(row, option)
        assert 0 <= found[place] < vocabulary
        if not is_close:
            num_compared += 1
            assert weights[found[place]] > 0, f"{option} drops it"
            assert found[place] == drawn_by_definition(weights, keys[place]), option
    assert num_compared >= count - 2


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_only_tokens_kept_by_the_sampling_filters_are_sampled_and_each_likely_one_is(
    runner: Any, vocabulary: int
) -> None:
    """With many keys over one row every kept token is drawn at some point, and never another."""
    generator = torch.Generator().manual_seed(vocabulary)
    row = torch.randn(vocabulary, generator=generator)
    for option in ((0.3, 0, 0.3, 0.0), (5.0, 6, 1.0, 0.0), (3.0, 9, 0.6, 0.0), (1.0, 0, 1.0, 0.4)):
        weights, is_close = kept_by_definition(row, option)
        assert not is_close
        kept = set(torch.nonzero(weights)[:, 0].tolist())
        count = 60 * len(kept) if runner.name != "interpreter" else 6
        keys = random_keys(count, generator)
        found = draw(runner, row.expand(count, -1).contiguous(), [option] * count, keys, torch.arange(count))
        assert set(found) <= kept
        often = {token for token in kept if weights[token] / weights.sum() * count > 20}
        assert set(found) >= often or runner.name == "interpreter", "not every likely token was drawn"


def test_equal_logits_at_the_top_k_or_top_p_border_are_kept_together(runner: Any) -> None:
    logits = torch.full((1, 3000), -1.0)
    logits[:, :500] = 2.0
    logits[:, 700] = 3.0
    generator = torch.Generator().manual_seed(3)
    for option, kept in (
        ((1.0, 3, 1.0, 0.0), {*range(500), 700}),
        ((1.0, 3, 0.001, 0.0), {700}),
        ((1.0, 0, 0.0001, 0.0), {700}),
        ((1.0, 0, 0.2, 0.0), {*range(500), 700}),
        ((1.0, 501, 1.0, 0.0), {*range(500), 700}),
    ):
        count = 400 if runner.name != "interpreter" else 6
        many = logits[:1].expand(count, -1).contiguous()
        found = draw(runner, many, [option] * count, random_keys(count, generator), torch.arange(count))
        assert set(found) <= kept
        assert len(set(found)) > min(len(kept) - 1, count // 2)


def test_equal_forbidden_and_extreme_logits_give_valid_tokens(runner: Any) -> None:
    """All equal, all but one forbidden, and numbers of very different sizes."""
    vocabulary = 2100
    logits = torch.zeros(5, vocabulary)
    logits[1] = -torch.inf
    logits[1, 2001] = -3.0
    logits[2, 9], logits[2, 10] = 1e30, -1e30
    logits[3] = torch.linspace(-1e-38, 1e-38, vocabulary)
    logits[4] = -3e38
    logits[4, 77:80] = torch.tensor([1e-20, 2e-20, -1e-20])
    generator = torch.Generator().manual_seed(4)
    for option in ((1.0, 0, 0.9, 0.0), (1.0, 2, 1.0, 0.0), (0.5, 50, 0.5, 0.1), (1.0, 0, 1.0, 0.0)):
        found = draw(runner, logits, [option] * 5, random_keys(5, generator), torch.arange(5))
        assert all(0 <= token < vocabulary for token in found)
        assert found[1] == 2001
        assert found[2] == 9
        assert found[4] in (77, 78, 79)


@pytest.mark.parametrize("option", OPTIONS)
def test_infinite_logits_are_drawn_first(runner: Any, option: tuple[float, ...]) -> None:
    logits = torch.randn(1, 3000)
    logits[:, :1000] = -torch.inf
    logits[:, [2000, 2100]] = torch.inf
    found = draw(runner, logits, [option], random_keys(1, torch.Generator().manual_seed(1)), torch.tensor([0]))
    assert found[0] in (2000, 2100)


def test_sampled_token_of_a_row_does_not_depend_on_other_rows(runner: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    count = len(OPTIONS)
    logits, keys = torch.randn(count, 3000, generator=generator), random_keys(count, generator)
    together = draw(runner, logits, OPTIONS, keys, torch.arange(count))
    for place in (1, 2):
        alone = draw(runner, logits[place : place + 1], OPTIONS[place : place + 1], keys[[place]], torch.arange(1))
        assert alone == [together[place]]


def test_empty_input_launches_nothing(runner: Any) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    given = (torch.zeros(2, 40), torch.zeros(0, 4, dtype=torch.float64), empty, empty)
    assert runner.ops.draw_tokens(*(tensor.to(runner.device) for tensor in given)).tolist() == []


@pytest.mark.gpu
def test_large_vocabularies_give_the_tokens_of_the_reference() -> None:
    """With 128,256 and 151,936 logits in 64 rows, another order of sums rarely changes a token."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from kvscope_kernels import ops_for

    generator = torch.Generator().manual_seed(6)
    for vocabulary, spread in ((128256, 1.0), (128256, 4.0), (151936, 2.0), (50257, 3.0)):
        logits = torch.randn(64, vocabulary, generator=generator) * spread
        options = torch.tensor([OPTIONS[place % len(OPTIONS)] for place in range(64)], dtype=torch.float64)
        given = (logits, options, random_keys(64, generator), torch.arange(64))
        expected = draw_tokens_torch(*(tensor.clone() for tensor in given))
        found = ops_for("cuda").draw_tokens(*(tensor.cuda() for tensor in given)).cpu()
        assert int((found != expected).sum()) <= 1, (vocabulary, spread, options[found != expected].tolist())


def test_token_sampling_kernel_names_an_invalid_argument() -> None:
    logits, options = torch.zeros(2, 64), torch.ones(1, 4, dtype=torch.float64)
    rows = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits is"):
        draw_tokens_torch(logits.half(), options, rows, rows)
    with pytest.raises(ValueError, match="rows is"):
        draw_tokens_torch(logits, options, rows, rows.int())
    with pytest.raises(ValueError, match="keys is"):
        draw_tokens_torch(logits, options, torch.zeros(2, dtype=torch.int64), rows)
    with pytest.raises(ValueError, match="options is"):
        draw_tokens_torch(logits, options.float(), rows, rows)
