"""`--speculative-config`: vLLM's fields and meaning; one clear line for everything else."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.drafting.config import parse_speculative_config
from kvscope_telemetry.errors import BadInput


@pytest.mark.parametrize(
    ("rest", "shortest", "longest"),
    [
        ("", 5, 5),
        (', "prompt_lookup_max": 4', 4, 4),
        (', "prompt_lookup_min": 2', 2, 2),
        (', "prompt_lookup_max": 4, "prompt_lookup_min": 2', 2, 4),
    ],
)
def test_what_vllm_accepts_means_the_same(rest: str, shortest: int, longest: int) -> None:
    config = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 5' + rest + "}")
    assert (config.num_speculative_tokens, config.shortest, config.longest) == (5, shortest, longest)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngram", "a JSON object is expected"),
        ("{}", "field 'num_speculative_tokens' is missing"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens='0' is not accepted"),
        ('{"num_speculative_tokens": 5, "method": "eagle"}', "method='eagle' is not accepted"),
        ('{"num_speculative_tokens": 5, "draft_model": "x"}', "field 'draft_model' is not known"),
        (
            '{"num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 2}',
            "prompt_lookup_min=3 is not accepted",
        ),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_speculative_config(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
