"""A server that answers as it is told, over real sockets, and what asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.telemetry.foreign.prompting.conftest import Call, FakeOpenAI

from kvscope_engine.bench.serving.client import Driven, Pace, drive
from kvscope_engine.bench.serving.samples import Sample
from kvscope_engine.bench.serving.target import Asking, address_of, reached


def chunk(text: str, **more: Any) -> dict[str, Any]:
    """Of a completion's stream."""
    return {"choices": [{"index": 0, "text": text, **more}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def answer(call: Call) -> None:
    """As many tokens as are asked for, whole."""
    call.stream()
    count = call.body["max_tokens"]
    for number in range(count):
        call.event(**chunk(f" {number}", finish_reason="length" if number == count - 1 else None))
    call.event(**usage(len(call.body["prompt"].split()), count))
    call.done()


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    made = FakeOpenAI()
    made.script = answer
    yield made
    made.close()


@pytest.fixture
def ask(fake: FakeOpenAI) -> Callable[..., Driven]:
    """Sends prompts of three words to `fake`, and tells what came."""

    def run(count: int = 1, tokens: int = 3, *, api_key: str = "", timeout_s: float = 60.0, **pace: Any) -> Driven:
        target = reached(address_of(fake.url, api_key=api_key), "", Asking(**pace.pop("asking", {})))
        samples = [Sample(f"one two {number}", 3, tokens) for number in range(count)]
        starts = pace.pop("starts_s", [0.0] * count)
        return drive(target, samples, Pace(starts, timeout_s=timeout_s, **pace), lambda num_ended: None)

    return run
