"""Sampling options outside their range raise a typed error that names them, from Python and from the wire."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.processes import resident_bytes

from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured
from kvscope_telemetry.messages.wire import decode_command, encode

FIELDS = [field.name for field in msgspec.structs.fields(SamplingParams)]
NUM_CASES = 1000
NUMBERS: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, 0, 0.0, -0.0, 1, -1, 0.5, 1.0000001, -1e-9, 5e-324, 1.7e308, -2.0, 2.0,
    10.5, 20, 21, 64, 65, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, True, False,
)  # fmt: skip
ONLY_IN_PYTHON: tuple[Any, ...] = (1 << 64, 10**400, -(10**400), 10**5000, 1j, b"0", object())


def non_numbers(generator: random.Random) -> tuple[Any, ...]:
    """Return values that are not numbers, some of them large."""
    return (
        None,
        "1",
        "",
        [],
        {},
        ["x"],
        [""],
        ["x" * 256],
        ["x" * 257],
        ["stop"] * 16,
        [str(number) for number in range(100_000)],
        ["x" * 1_000_000],
        [1, 2],
        [["nested"]],
        "x" * generator.randint(0, 1_000_000),
    )


def cases(seed: int, extra: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """Return cases with one to three fields each, with values from all kinds."""
    generator = random.Random(seed)
    values = (*NUMBERS, *non_numbers(generator), *extra)
    return [
        {name: generator.choice(values) for name in generator.sample(FIELDS, generator.randint(1, 3))}
        for _ in range(NUM_CASES)
    ]


def check_in_range(said: SamplingParams) -> None:
    params = said.resolved()
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert -1 <= params.top_k <= 1 << 31
    assert 1 <= params.n <= 64
    assert params.max_tokens is None or 1 <= params.max_tokens <= 1 << 24
    assert 0 <= params.min_tokens <= (params.max_tokens or 1 << 24)
    assert -2 <= params.presence_penalty <= 2
    assert -2 <= params.frequency_penalty <= 2
    assert 0 < params.repetition_penalty <= 10
    assert params.logprobs is None or 0 <= params.logprobs <= 20
    assert len(params.stop) <= 16
    assert all(0 < len(text) <= 256 for text in params.stop)
    assert all(0 <= token < 1 << 31 for token in params.stop_token_ids)
    assert all(0 <= token < 1 << 31 and -100 <= bias <= 100 for token, bias in params.logit_bias.items())


def from_python(options: dict[str, Any]) -> SamplingParams:
    values = options | ({"stop": tuple(options["stop"])} if isinstance(options.get("stop"), list) else {})
    return SamplingParams(**values)


def from_wire(options: dict[str, Any]) -> SamplingParams:
    command = {"type": "Submit", "request_id": "r", "prompt": "p", "sampling": options}
    submit = decode_command(msgspec.msgpack.encode(command))
    assert isinstance(submit, Submit)
    return submit.sampling


@pytest.mark.parametrize(
    ("make", "error", "extra"),
    [(from_python, BadInput, ONLY_IN_PYTHON), (from_wire, ProtocolError, ())],
    ids=["python", "wire"],
)
def test_absurd_options_are_accepted_in_range_or_refused_in_one_line(
    make: Callable[[dict[str, Any]], SamplingParams], error: type[Exception], extra: tuple[Any, ...]
) -> None:
    num_taken = run_cases(0, make, error, extra)
    assert 20 < num_taken < NUM_CASES / 2
    gc.collect()
    before = resident_bytes()
    run_cases(1, make, error, extra)
    gc.collect()
    assert resident_bytes() - before < 10 << 20


def run_cases(
    seed: int, make: Callable[[dict[str, Any]], SamplingParams], error: type[Exception], extra: tuple[Any, ...]
) -> int:
    num_taken = 0
    for options in cases(seed, extra):
        try:
            params = make(options)
        except error as refusal:
            check_line(str(refusal))
        else:
            check_in_range(params)
            num_taken += 1
    return num_taken


def check_line(text: str) -> None:
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": -0.1}, "temperature=-0.1 is not accepted: must be a number from 0 to 100"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"top_p": 0.0}, "top_p=0.0 is not accepted: must be a number above 0 and at most 1"),
        ({"n": 1 << 31}, "n=2147483648 is not accepted: must be a whole number from 1 to 64"),
        ({"seed": 10**5000}, "seed=(thousands of digits)"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens=20 is not accepted: must be a whole number from 0 to 10"),
        ({"stop": ("",)}, "stop string ''"),
        ({"stop": "x"}, "a tuple of strings"),
        ({"stop": ("x",) * 100_000}, "stop has 100000 strings: at most 16"),
        ({"stop_token_ids": [1]}, "a tuple of token ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids=-1 is not accepted: must be a whole number from 0 to 2147483647"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids has 257 tokens: at most 256"),
        ({"logit_bias": [(1, 2.0)]}, "must map token ids to biases"),
        ({"logit_bias": {7: 101.0}}, "logit_bias of token 7=101.0 is not accepted: must be a number from -100 to 100"),
        ({"logit_bias": {7: math.nan}}, "logit_bias of token 7=nan"),
        ({"logit_bias": {"7": 1.0}}, "a token of logit_bias='7' is not accepted"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 tokens: at most 1024"),
        ({"structured": {"kind": "regex"}}, "a Structured or None"),
    ],
)
def test_error_names_the_value_and_the_accepted_range(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput) as refusal:
        SamplingParams(**options)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("xml", "a", "kind='xml' of structured output is not accepted: json_schema, json_object"),
        ("regex", " ", "regex is empty"),
        ("regex", "a" * (1 << 20), "regex has 1048576 characters: at most 262144"),
        ("json_object", "{}", "json_object takes no text"),
        ("choice", "red", "choice='red' is not accepted: must be a JSON array of strings"),
        ("choice", "[]", "choice has 0 strings: 1 to 1024"),
        ("choice", '["a", ""]', "choice has an empty string"),
    ],
)
def test_invalid_structured_output_is_refused_by_name(kind: Any, text: str, named: str) -> None:
    with pytest.raises(BadInput) as refusal:
        Structured(kind=kind, text=text)
    assert named in str(refusal.value)


def test_newer_sampling_options_decoded_from_their_encoding_are_equal() -> None:
    sampling = SamplingParams(
        stop_token_ids=(3, 4), logit_bias={5: -100.0, 6: 1}, structured=Structured(kind="choice", text='["a","b"]')
    )
    submit = Submit(request_id="r", prompt="p", sampling=sampling, cache_salt="mine", tools="[]")
    assert decode_command(encode(submit)) == submit
    assert sampling.structured is not None
    assert sampling.structured.choices() == ("a", "b")
