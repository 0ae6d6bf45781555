"""Hooks around methods of an engine never change what these do and return, and can be removed."""

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


def test_hooks_see_arguments_and_results_of_a_method_without_changing_them(hooks: Hooks) -> None:
    engine, seen = Engine(), []
    hooks.before(engine, "step", lambda *args, **kwargs: seen.append((args, kwargs)))
    hooks.after(engine, "step", lambda result, *args, **kwargs: seen.append(result))
    assert engine.step("a", times=2) == "aa"
    assert seen == [(("a",), {"times": 2}), "aa"]
    hooks.remove()
    assert engine.step("b") == "b"
    assert len(seen) == 2
    assert "step" not in vars(engine)


def test_class_is_restored_after_removal(hooks: Hooks) -> None:
    original, seen = Engine.step, []
    hooks.after(Engine, "step", lambda result, engine, *_: seen.append((result, type(engine))))
    assert Engine().step("a") == "a"
    assert seen == [("a", Engine)]
    hooks.remove()
    assert Engine.step is original


def test_hooking_a_missing_method_records_its_name(hooks: Hooks) -> None:
    assert not hooks.after(Engine(), "launch", lambda *_: None)
    assert hooks.missing == ["launch"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_first_failed_hook_ends_all_hooks_and_the_method_goes_on(
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


def test_exception_of_the_method_itself_is_raised(hooks: Hooks, failures: list[tuple[str, str]]) -> None:
    engine = Engine()
    hooks.after(engine, "step", lambda *_: None)
    with pytest.raises(TypeError):
        engine.step()  # type: ignore[call-arg]
    assert failures == []


def test_wrapper_around_a_hook_stays_after_removal(hooks: Hooks) -> None:
    engine, seen = Engine(), []
    hooks.after(engine, "step", lambda *_: seen.append("ours"))
    ours = engine.step
    engine.step = lambda what: ours(what) + "!"  # type: ignore[method-assign, misc, assignment]
    assert engine.step("a") == "a!"
    hooks.remove()
    assert engine.step("b") == "b!"
    assert seen == ["ours"], "the removed hook was called"
