"""Failures in a step: one in the output of a request ends that request; any other ends the engine with its reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine import Engine, SamplingParams
from kvscope_engine.outputs import OutputStream
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens

Make = Callable[..., Engine]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = {"good": tuple(range(3, 13)), "bad": tuple(range(40, 53)), "other": tuple(range(90, 97))}


def _run_requests(engine: Engine, *names: str) -> dict[str, SimpleNamespace]:
    said: list[Tokens | Finished] = []
    for name in names:
        engine.submit(Submit(request_id=name, prompt_token_ids=PROMPTS[name], sampling=GREEDY))
    while engine.has_unfinished:
        said += engine.step()
    return {
        name: SimpleNamespace(
            tokens=[token for m in said if isinstance(m, Tokens) and m.request_id == name for token in m.token_ids],
            last=[m for m in said if isinstance(m, Finished) and m.request_id == name],
        )
        for name in names
    }


def _assert_nothing_is_allocated(engine: Engine) -> None:
    engine.components.scheduler.check_integrity()
    assert BlockState.ACTIVE not in engine.snapshot().blocks.state


def _process_failing_for(name: str, after: int, whole: Callable[..., Any]) -> Callable[..., Any]:
    def process_token(stream: OutputStream, *values: Any) -> Any:
        if stream.client_id == name and len(stream.request.output_token_ids) >= after:
            raise ValueError("an evil\ntokenizer")
        return whole(stream, *values)

    return process_token


@pytest.mark.parametrize("after", [1, 5, 12])
def test_request_whose_output_fails_ends_with_an_error_and_others_are_unchanged(
    after: int, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = _run_requests(make_engine(), "good", "other")
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(OutputStream, "process_token", _process_failing_for("bad", after, OutputStream.process_token))
        together = _run_requests(engine, "good", "bad", "other")
    for name in ("good", "other"):
        assert together[name].tokens == alone[name].tokens
        assert together[name].last[0].finish_reason == "length"
    (last,) = together["bad"].last
    assert (last.finish_reason, last.usage.completion_tokens) == ("error", after)
    assert last.error == "its output could not be written: ValueError('an evil\\ntokenizer')"
    _assert_nothing_is_allocated(engine)
    assert _run_requests(engine, "good")["good"].tokens == alone["good"].tokens, "the engine did not continue correctly"


def test_request_ends_even_if_its_detokenizer_fails_at_the_end(make_engine: Make) -> None:
    class Evil:
        stopped = False

        def add_token(self, token_id: int, *, may_stop: bool = True) -> str:
            return "a"

        def flush(self) -> str:
            raise ValueError("an evil tokenizer")

    engine = make_engine()
    numbers = engine.submit(Submit(request_id="bad", prompt_token_ids=PROMPTS["bad"], sampling=GREEDY)).numbers
    engine.streams[numbers[0]].detokenizer = Evil()  # type: ignore[assignment]
    engine.step()
    engine.abort("bad")
    said = engine.step()
    assert [m.finish_reason for m in said if isinstance(m, Finished)] == ["abort"]
    _assert_nothing_is_allocated(engine)


@pytest.mark.parametrize("phase", ["schedule", "run", "commit", "record"])
def test_exception_in_a_phase_of_an_engine_step_is_raised(
    phase: str, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    parts = engine.components
    owners = {
        "schedule": parts.scheduler,
        "run": parts.runner,
        "commit": parts.scheduler,
        "record": engine.step_recorder,
    }

    def evil(*values: Any) -> None:
        raise ValueError(f"evil {phase}")

    monkeypatch.setattr(owners[phase], phase, evil)
    engine.submit(Submit(request_id="good", prompt_token_ids=PROMPTS["good"], sampling=GREEDY))
    with pytest.raises(ValueError, match=f"evil {phase}"):
        engine.step()
