"""Structured output of the default model on a real engine: in batches, forked, preempted, aborted and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import pytest

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.structured import Structured


class Animal(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=8)]
    kind: Literal["cat", "dog"]
    age: Annotated[int, msgspec.Meta(ge=0, le=30)]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "kind", "age"],
}
JSON = Structured(kind="json_schema", text=json.dumps(SCHEMA))
CHOICE = Structured(kind="choice", text='["yes, certainly", "no", "perhaps"]')
DATE = Structured(kind="regex", text=r"\d{4}-\d{2}-\d{2}")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200}


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.storm), True], ids=["in turns", "overlapped"]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    pytest.importorskip("xgrammar")
    config = EngineConfig(
        device="cpu",
        num_gpu_blocks_override=128,
        block_size=16,
        max_model_len=512,
        host_kv_memory_bytes=16 << 20,
        async_scheduling=request.param,
    )
    with Engine(config) as engine:
        yield engine


def make_submit(name: str, prompt: str, form: Structured | None, **options: Any) -> Submit:
    return Submit(request_id=name, prompt=prompt, sampling=SamplingParams(structured=form, **(GREEDY | options)))


def run(engine: Engine, said: list[Tokens | Finished] | None = None) -> list[Tokens | Finished]:
    said = [] if said is None else said
    while engine.has_unfinished:
        said += engine.step()
    return said


def text_of(said: Sequence[Tokens | Finished], name: str, index: int = 0) -> str:
    mine = [message for message in said if message.request_id == name and message.index == index]
    return "".join(message.text for message in mine if isinstance(message, Tokens))


def finish_reasons(said: Sequence[Tokens | Finished], name: str) -> list[str]:
    return [message.finish_reason for message in said if isinstance(message, Finished) and message.request_id == name]


def test_every_form_at_every_temperature_matches_in_one_batch(engine: Engine, storm: Callable[[int, int], int]) -> None:
    num_draws = storm(1, 3)
    submits = [make_submit("plain", "Count to five.", None, max_tokens=24, ignore_eos=True)]
    for seed in range(1 + num_draws):
        options = {"temperature": 1.5 if seed else 0.0, "seed": seed}
        submits += [
            make_submit(f"json {seed}", "Describe a cat as JSON.", JSON, **options),
            make_submit(f"choice {seed}", "Is the sky blue?", CHOICE, **options),
            make_submit(f"date {seed}", "When was that?", DATE, **options, ignore_eos=True),
        ]
    for submit in submits:
        engine.submit(submit)
    said = run(engine)
    assert finish_reasons(said, "plain") == ["length"], "who asks for no form goes on beside them"
    for seed in range(1 + num_draws):
        msgspec.json.decode(text_of(said, f"json {seed}"), type=Animal)
        assert text_of(said, f"choice {seed}") in msgspec.json.decode(CHOICE.text)
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text_of(said, f"date {seed}"))
    assert all(finish_reasons(said, submit.request_id) == ["stop"] for submit in submits[1:])


def test_one_request_with_a_form_does_not_reduce_overlaps(engine: Engine) -> None:
    """As many steps are launched ahead as for the same requests without a grammar: all but the first."""
    counts = []
    for form in (None, DATE):
        overlapped, why_not = engine.overlaps.overlapped, engine.overlaps.blockers.copy()
        engine.submit(make_submit("first", "When was that?", form, max_tokens=10, ignore_eos=form is None))
        for number in range(7):
            engine.submit(make_submit(f"r{number}", "Count.", None, max_tokens=10, ignore_eos=True))
        run(engine)
        counts.append(engine.overlaps.overlapped - overlapped)
        assert not engine.overlaps.blockers - why_not
    assert min(counts) >= 9 if engine.components.overlaps else counts == [0, 0]  # a late mask costs one more


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_preempted_request_continues_its_form(engine: Engine, how: str) -> None:
    (number,) = engine.submit(make_submit("r", "Describe a dog as JSON.", JSON)).numbers
    said: list[Tokens | Finished] = []
    for _ in range(4):
        said += engine.step()
    engine.interventions.preempt(number, how, "a test")
    before = text_of(said, "r")
    text = text_of(run(engine, said), "r")
    assert before
    assert text.startswith(before)
    assert finish_reasons(said, "r") == ["stop"]
    msgspec.json.decode(text, type=Animal)


def test_completions_of_one_prompt_differ_and_match_the_form(engine: Engine) -> None:
    engine.submit(make_submit("r", "Describe an animal as JSON.", JSON, temperature=1.5, seed=5, n=3))
    said = run(engine)
    texts = [text_of(said, "r", index) for index in range(3)]
    for text in texts:
        msgspec.json.decode(text, type=Animal)
    assert len(set(texts)) > 1


def test_aborted_request_with_a_form_leaves_nothing(engine: Engine) -> None:
    engine.submit(make_submit("r", "Describe a dog as JSON.", JSON))
    said: list[Tokens | Finished] = []
    for _ in range(5):
        said += engine.step()
    engine.abort("r")
    assert finish_reasons(run(engine, said), "r") == ["abort"]
    assert engine.num_unfinished == 0


def test_invalid_form_is_refused_while_others_continue(engine: Engine) -> None:
    engine.submit(make_submit("good", "Is the sky blue?", CHOICE))
    said = engine.step()
    with pytest.raises(BadInput, match="json_schema is not accepted: Unsupported type"):
        engine.submit(make_submit("bad", "x", Structured(kind="json_schema", text='{"type": "colour"}')))
    run(engine, said)
    assert finish_reasons(said, "good") == ["stop"]
    assert text_of(said, "good") in msgspec.json.decode(CHOICE.text)


def test_output_cut_short_is_a_beginning_of_the_form(engine: Engine) -> None:
    engine.submit(make_submit("r", "When?", DATE, max_tokens=2))
    said = run(engine)
    assert finish_reasons(said, "r") == ["length"]
    assert re.fullmatch(r"[0-9]{1,4}(-[0-9]*)?", text_of(said, "r"))


def test_biases_stop_tokens_and_log_probabilities_work_with_a_form(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    (no,) = tokenizer.encode("no", add_special_tokens=False)
    engine.submit(make_submit("biased", "Is the sky blue?", CHOICE, logit_bias={no: 100.0}, logprobs=2))
    said = run(engine)
    assert text_of(said, "biased") == "no"
    first = next(message for message in said if isinstance(message, Tokens))
    assert first.logprob_texts[0][0] == "no"
    assert len(first.logprob_texts[0]) == 3
    engine.submit(make_submit("stopped", "Is the sky blue?", CHOICE, logit_bias={no: 100.0}, stop_token_ids=(no,)))
    assert text_of(run(engine), "stopped") == ""


def test_min_tokens_does_not_extend_a_complete_text(engine: Engine) -> None:
    engine.submit(make_submit("r", "When?", DATE, min_tokens=50))
    said = run(engine)
    assert finish_reasons(said, "r") == ["stop"]
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text_of(said, "r"))


LATE = Structured(kind="regex", text="x{120}(.{1,60}){1,60}(.{1,60}){1,60}")
"""A form whose masks take too long from a position on that is not checked when it is accepted."""


def test_request_whose_mask_never_comes_ends_with_an_error_while_others_continue(engine: Engine) -> None:
    engine.submit(make_submit("late", "x", LATE, max_tokens=400))
    engine.submit(make_submit("plain", "Count.", None, max_tokens=400, ignore_eos=True))
    engine.submit(make_submit("date", "When?", DATE))
    said: list[Tokens | Finished] = []
    while "late" not in {message.request_id for message in said if isinstance(message, Finished)}:
        said += engine.step()
    (last,) = (message for message in said if isinstance(message, Finished) and message.request_id == "late")
    assert last.error in (
        "its structured output took more than 0.25 s of computing for one token",
        "the process of its structured output did not respond for 60 s",  # a busy machine may give it less than that
    )
    assert finish_reasons(said, "date") == ["stop"]
    engine.abort("plain")
    run(engine, said)
    assert text_of(said, "late").startswith("x" * 100)
    num_meanwhile = sum(1 for message in said if isinstance(message, Tokens) and message.request_id == "plain")
    assert num_meanwhile > completion_tokens_of(said, "late"), "steps waited for the mask"


def test_request_waiting_for_its_mask_can_be_preempted(engine: Engine) -> None:
    (number,) = engine.submit(make_submit("late", "x", LATE, max_tokens=400)).numbers
    said: list[Tokens | Finished] = []
    while len(text_of(said, "late")) < 120:
        said += engine.step()
    for how in ("recompute", "swap"):
        engine.interventions.preempt(number, how, "a test")
        said += engine.step()
    assert finish_reasons(run(engine, said), "late") == ["error"]


def completion_tokens_of(said: Sequence[Tokens | Finished], name: str) -> int:
    return sum(m.usage.completion_tokens for m in said if isinstance(m, Finished) and m.request_id == name)
