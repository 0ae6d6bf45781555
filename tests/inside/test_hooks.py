"""Functions of ours around somebody else's: what they do and return is never changed, and ours can be taken away."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_inside.hooks import Hooks


class Engine:
    def __init__(self) -> None:
        self.did: list[str] = []

    def step(self, what: str, times: int = 1) -> str:
        self.did.append(what)
        return what * times


@pytest.fixture
def failures() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def hooks(failures: list[tuple[str, str]]) -> Hooks:
    return Hooks(lambda name, error: failures.append((name, str(error))))


def test_what_a_method_is_given_and_returns_is_seen_and_stays(hooks: Hooks) -> None:
    engine, seen = Engine(), []
    hooks.before(engine, "step", lambda *args, **kwargs: seen.append((args, kwargs)))
    hooks.after(engine, "step", lambda result, *args, **kwargs: seen.append(result))
    assert engine.step("a", times=2) == "aa"
    assert seen == [(("a",), {"times": 2}), "aa"]
    hooks.remove()
    assert engine.step("b") == "b"
    assert len(seen) == 2
    assert "step" not in vars(engine)


def test_a_class_is_as_it_was_after_removal(hooks: Hooks) -> None:
    original, seen = Engine.step, []
    hooks.after(Engine, "step", lambda result, engine, *_: seen.append((result, type(engine))))
    assert Engine().step("a") == "a"
    assert seen == [("a", Engine)]
    hooks.remove()
    assert Engine.step is original


def test_a_method_that_is_not_there_is_named(hooks: Hooks) -> None:
    assert not hooks.after(Engine(), "launch", lambda *_: None)
    assert hooks.missing == ["launch"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_first_exception_of_ours_ends_all_hooks_and_nothing_of_theirs(
    when: str, hooks: Hooks, failures: list[tuple[str, str]]
) -> None:
    engine, seen = Engine(), []

    def broken(*_: Any) -> None:
        seen.append(1)
        raise KeyError("ours")

    getattr(hooks, when)(engine, "step", broken)
    assert [engine.step("a"), engine.step("b")] == ["a", "b"]
    assert engine.did == ["a", "b"]
    assert seen == [1]
    assert failures == [("step", "'ours'")]


def test_an_exception_of_theirs_is_theirs(hooks: Hooks, failures: list[tuple[str, str]]) -> None:
    engine = Engine()
    hooks.after(engine, "step", lambda *_: None)
    with pytest.raises(TypeError):
        engine.step()  # type: ignore[call-arg]
    assert failures == []


def test_what_others_put_around_ours_stays(hooks: Hooks) -> None:
    engine, seen = Engine(), []
    hooks.after(engine, "step", lambda *_: seen.append("ours"))
    ours = engine.step
    engine.step = lambda what: ours(what) + "!"  # type: ignore[method-assign, misc, assignment]
    assert engine.step("a") == "a!"
    hooks.remove()
    assert engine.step("b") == "b!"
    assert seen == ["ours"], "it only calls on"
