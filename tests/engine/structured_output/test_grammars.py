"""Forms are followed by random allowed tokens of the default model: every text matches its form."""

from __future__ import annotations

import json
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest

from kvscope_engine.structured_output import structured_output_manager as forms_module
from kvscope_engine.structured_output.grammar_compiler import MAX_WHITESPACE
from kvscope_engine.structured_output.grammar_matcher import GrammarMatcher
from kvscope_engine.structured_output.structured_output_manager import (
    PreparedPrompt,
    StructuredOutputManager,
    matcher_for,
    prepare_prompt,
)
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.structured import Structured

NUM_LOGITS = 49_280
"""More than the default model's 49,152, like a padded output layer."""
LONG_S = 60.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "\U0001f600"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
}
CHOICES = ("red", 'with "quotes" and \\', "new\nline\tand tab", "naïve \U0001f600", "redder", "\x7f\u2028\u00a0x")


@pytest.fixture(scope="module")
def forms(default_tokenizer: Tokenizer) -> Iterator[StructuredOutputManager]:
    pytest.importorskip("xgrammar")
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})) as forms:
        yield forms


def allowed(matcher: GrammarMatcher, *, may_end: bool = True) -> list[int]:
    words = np.zeros((3, NUM_LOGITS // 32), np.int32)
    matcher.fill(words, 1, may_end=may_end)
    assert not words[[0, 2]].any(), "other rows are left alone"
    bits = np.unpackbits(words[1].view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def walk(matcher: GrammarMatcher, tokenizer: Tokenizer, seed: int) -> str:
    """Return the text of tokens drawn from the allowed ones, ending as soon as possible."""
    drawn = random.Random(seed)
    said: list[int] = []
    while not matcher.has_ended:
        tokens = allowed(matcher)
        assert not tokenizer.special_token_ids - {2} & set(tokens)
        assert max(tokens) < tokenizer.vocab_size
        token = 2 if 2 in tokens and drawn.random() < 0.5 else drawn.choice(tokens)
        matcher.accept(token)
        said.append(token)
        assert len(said) < 2000
    assert said.pop() == 2
    return tokenizer.decode(said, skip_special_tokens=True)


def matches_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "sizes"]
        and 2 <= len(value["name"]) <= 6
        and value["kind"] in ("cat", "dog", "\U0001f600")
        and len(value["sizes"]) <= 2
        and all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])
    )


KINDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "json_schema": (json.dumps(SCHEMA), matches_schema),
    "regex": (r"[a-f]{2,4}-(\d|é)+", re.compile(r"[a-f]{2,4}-([0-9]|é)+").fullmatch),
    "grammar": ('root ::= "(" root ")" | [xyz] | "\\u00e9"', re.compile(r"\(*[xyzé]\)*").fullmatch),
    "choice": (json.dumps(CHOICES), CHOICES.__contains__),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_allowed_tokens_make_a_text_of_the_form(
    kind: Any, forms: StructuredOutputManager, default_tokenizer: Tokenizer
) -> None:
    text, is_right = KINDS[kind]
    form = forms.get(Structured(kind=kind, text=text))
    for seed in range(12):
        said = walk(form.matcher(), default_tokenizer, seed)
        assert is_right(said), said


def test_grammar_of_choices_allows_every_choice(forms: StructuredOutputManager, default_tokenizer: Tokenizer) -> None:
    form = forms.get(Structured(kind="choice", text=json.dumps(CHOICES)))
    for choice in CHOICES:
        matcher = form.matcher()
        for token in default_tokenizer.encode(choice, add_special_tokens=False):
            matcher.accept(token)
        assert 2 in allowed(matcher)


def test_json_object_form_accepts_any_object(forms: StructuredOutputManager, default_tokenizer: Tokenizer) -> None:
    matcher = forms.get(Structured(kind="json_object")).matcher()
    for token in default_tokenizer.encode('{"a": [1, null, {"b": "c"}]}', add_special_tokens=False):
        matcher.accept(token)
    assert 2 in allowed(matcher)


def test_whitespace_between_two_parts_is_limited(forms: StructuredOutputManager, default_tokenizer: Tokenizer) -> None:
    matcher = forms.get(Structured(kind="json_object")).matcher()
    (newline,) = default_tokenizer.encode("\n", add_special_tokens=False)
    matcher.accept(*default_tokenizer.encode("{", add_special_tokens=False))
    for _ in range(MAX_WHITESPACE):
        assert newline in allowed(matcher)
        matcher.accept(newline)
    assert newline not in allowed(matcher)
    with pytest.raises(KvscopeError, match="does not allow"):
        matcher.accept(newline)


def test_grammar_allows_no_end_below_min_tokens_unless_only_the_end_is_possible(forms: StructuredOutputManager) -> None:
    matcher = forms.get(Structured(kind="regex", text="a*")).matcher()
    assert 2 in allowed(matcher)
    assert 2 not in allowed(matcher, may_end=False)
    only_ends = forms.get(Structured(kind="regex", text="(b)?")).matcher()
    (b,) = [token for token in allowed(only_ends) if token != 2]
    only_ends.accept(b)
    assert allowed(only_ends, may_end=False) == [2]


def test_completions_of_one_form_advance_independently(forms: StructuredOutputManager) -> None:
    form = forms.get(Structured(kind="regex", text="[ab]c"))
    first, second = form.matcher(), form.matcher()
    first.accept(allowed(first)[0])
    assert allowed(second) != allowed(first)


def test_many_grammar_matchers_get_separate_token_masks(forms: StructuredOutputManager) -> None:
    form = forms.get(Structured(kind="regex", text="a[bc]|d[ef]|g[hi]"))
    for _ in range(3):
        matchers = [form.matcher() for _ in range(40)]
        firsts = [token for token in allowed(matchers[0]) if token < 256][:3]
        for number, matcher in enumerate(matchers):
            matcher.accept(firsts[number % 3])
        forms.request_masks()
        while not all(matcher.is_ready for matcher in matchers):
            forms.await_masks(is_idle=True)
        found = [tuple(allowed(matcher)) for matcher in matchers]
        assert len(set(found[:3])) == 3
        assert found == (found[:3] * 14)[:40]


def test_new_grammar_is_refused_while_grammars_in_use_exceed_the_memory_limit(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})) as forms:
        kept = forms.get(Structured(kind="regex", text="kept"))
        monkeypatch.setattr(forms_module, "MAX_BYTES", 1)
        with pytest.raises(BadInput, match="the engine is behind: the grammars in use already take"):
            forms.get(Structured(kind="regex", text="another"))
        del kept
        assert allowed(forms.get(Structured(kind="regex", text="another")).matcher())


def test_without_an_end_token_a_complete_text_ends(default_tokenizer: Tokenizer) -> None:
    pytest.importorskip("xgrammar")
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, ())) as forms:
        matcher = forms.get(Structured(kind="regex", text="ab")).matcher()
        for token in default_tokenizer.encode("ab", add_special_tokens=False):
            assert not matcher.has_ended
            matcher.accept(token)
        assert matcher.has_ended


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("regex", "[a-z", "regex is not accepted: Regex parsing error"),
        ("regex", r"(a)\1", "regex is not accepted: Regex parsing error at position 4: Backreference"),
        ("json_schema", "{", "json_schema='{' is not accepted: it is no JSON"),
        ("json_schema", "[1]", r"json_schema='\[1\]' is not accepted: must be an object or a boolean"),
        ("json_schema", '{"type": "foo"}', 'json_schema is not accepted: Unsupported type "foo"'),
        ("json_schema", '{"$ref": "#/nowhere"}', "json_schema is not accepted: Cannot find field nowhere"),
        ("json_schema", "[" * 100_000, "json_schema is not accepted: 100000 levels are nested, at most 128"),
        ("grammar", "root ::= other", 'Rule "other" is not defined'),
        ("grammar", 'start ::= "a"', 'The root rule with name "root" is not found'),
        ("grammar", 'root ::= root "a"', "grammar is not accepted: no text of this model's tokens matches it"),
        ("regex", "(" * 50_000 + ")" * 50_000, "regex is not accepted: EBNF parser error"),
        ("regex", "a\ud800", "regex is not accepted: '.*' at position 1 is half of a surrogate pair, not a character"),
    ],
)
def test_invalid_form_is_refused_in_one_line(forms: StructuredOutputManager, kind: Any, text: str, named: str) -> None:
    with pytest.raises(BadInput, match=named) as refusal:
        forms.get(Structured(kind=kind, text=text))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": ' * 250 + "{}" + "}}" * 250),
        ("json_schema", '{"items": ' * 500 + "{}" + "}" * 500),
        ("json_schema", '{"anyOf": [' * 100 + "{}" + "]}" * 100),
        ("structural_tag", '{"type": "structural_tag", "format": ' + '{"items": ' * 200 + "{}" + "}" * 201),
    ],
)
def test_deeply_nested_schema_is_refused_before_it_is_compiled(kind: Any, text: str) -> None:
    without_tokenizer: Any = None
    with pytest.raises(BadInput, match=r"levels are nested, at most 128 are accepted"):
        StructuredOutputManager(without_tokenizer, NUM_LOGITS, {2}).get(Structured(kind=kind, text=text))


def test_brackets_inside_strings_do_not_count_as_nested(forms: StructuredOutputManager) -> None:
    text = json.dumps({"const": '\\"' + "[{" * 200})
    assert allowed(forms.get(Structured(kind="json_schema", text=text)).matcher())


def test_grammar_used_again_is_not_compiled_again(forms: StructuredOutputManager) -> None:
    asked = Structured(kind="choice", text='["kept"]')
    assert not forms.is_compiled(asked)
    kept = forms.get(asked)
    assert forms.is_compiled(asked)
    assert forms.get(asked) is kept
    prompt = prepare_prompt([1, 2], asked, forms)
    assert prompt == [1, 2]
    assert isinstance(prompt, PreparedPrompt)
    assert prepare_prompt(prompt, asked, None) is prompt, "a prepared prompt was compiled again"
    assert matcher_for(prompt) is not None
    assert matcher_for([1, 2]) is None


def test_recently_used_forms_are_kept_and_those_in_use_stay(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(forms_module, "MAX_CACHED", 1)
    monkeypatch.setattr(forms_module, "MAX_GRAMMARS", 2)
    a, b, c, d = (Structured(kind="regex", text=text) for text in "abcd")
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})) as forms:
        in_use = forms.get(a)
        forms.get(b)
        assert forms.is_compiled(a)
        assert forms.is_compiled(b)
        forms.get(c)
        assert not forms.is_compiled(b)
        also_in_use = forms.get(d)
        assert not forms.is_compiled(c)
        with pytest.raises(BadInput, match="the engine is behind: 2 grammars are already in use"):
            forms.get(c)
        assert allowed(in_use.matcher())
        assert allowed(also_in_use.matcher())


COSTLY = {
    "endless masks": "(.{1,60}){1,60}(.{1,60}){1,60}",
    "a second a mask": "(.{1,60}){1,60}",
    "costly where it goes on": "x{30}(.{1,60}){1,60}",
    "many stars": "(a*)*" * 500,
    "large": "(" * 900 + "a{1,900}" + "){1,900}" * 900,
}


@pytest.mark.parametrize("name", COSTLY)
def test_too_costly_form_is_refused_before_it_is_accepted(name: str, forms: StructuredOutputManager) -> None:
    with pytest.raises(BadInput, match=r"too costly|Repetition|limit") as refusal:
        forms.get(Structured(kind="regex", text=COSTLY[name]))
    assert "\n" not in str(refusal.value)
    assert allowed(forms.get(Structured(kind="regex", text="ab")).matcher()), "other forms are affected"


LATE = "x{400}(.{1,60}){1,60}(.{1,60}){1,60}"
"""The costly part is found only by a token four hundred letters away."""


@pytest.fixture
def matcher_before_costly_token(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GrammarMatcher]:
    """A matcher one token before the costly part, which was not found in advance."""
    pytest.importorskip("xgrammar")
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2}, LONG_S)) as forms:
        matcher = forms.get(Structured(kind="regex", text=LATE)).matcher()
        ids = default_tokenizer.encode("x" * 400, add_special_tokens=False)
        for token in ids:
            matcher.accept(token)
        yield matcher


def test_too_slow_token_ends_its_request_and_delays_no_other(
    matcher_before_costly_token: GrammarMatcher, forms: StructuredOutputManager, default_tokenizer: Tokenizer
) -> None:
    assert not matcher_before_costly_token.is_ready
    other = forms.get(Structured(kind="regex", text="(yes|no)+")).matcher()
    for _ in range(20):
        other.accept(*default_tokenizer.encode("yes", add_special_tokens=False))
        assert allowed(other)
    words = np.zeros((1, NUM_LOGITS // 32), np.int32)
    matcher_before_costly_token.fill(words, 0, may_end=True)
    assert matcher_before_costly_token.is_ready
    with pytest.raises(
        KvscopeError, match=r"took more than 0.25 s of computing for one token|did not respond for 60 s"
    ):
        matcher_before_costly_token.accept(3)


def test_compiling_stops_if_no_client_waits_for_the_form(forms: StructuredOutputManager) -> None:
    asked = Structured(kind="regex", text="(.{1,60}){1,60}(.{1,60}){1,60}(.{1,60}){1,60}")
    is_wanted = threading.Event()
    is_wanted.set()
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        with pytest.raises(BadInput) as refusal:
            forms.get(asked, is_wanted.is_set)
        reasons.put(str(refusal.value))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    is_wanted.clear()
    assert [reasons.get(timeout=LONG_S) for _ in threads] == ["no client waits for this grammar any more"] * 2
    for thread in threads:
        thread.join()


def accept_tokens(matcher: GrammarMatcher, count: int) -> None:
    for _ in range(count):
        matcher.accept(allowed(matcher)[0])


def test_killed_grammar_process_ends_its_requests_and_a_new_one_starts(default_tokenizer: Tokenizer) -> None:
    pytest.importorskip("xgrammar")
    asked = Structured(kind="regex", text="[ab]+")
    before = psutil.Process().children()
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})) as forms:
        matcher = forms.get(asked).matcher()
        (keeper,) = (child for child in psutil.Process().children() if child not in before)
        keeper.kill()
        keeper.wait()
        allowed(matcher)
        with pytest.raises(KvscopeError, match="the process of its structured output"):
            accept_tokens(matcher, 100)
        del matcher
        assert allowed(forms.get(asked).matcher())


def test_no_process_is_left_after_closing(default_tokenizer: Tokenizer) -> None:
    pytest.importorskip("xgrammar")
    before = set(psutil.Process().children(recursive=True))
    with closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})) as forms:
        form = forms.get(Structured(kind="regex", text="[ab]+"))
        mine = set(psutil.Process().children(recursive=True)) - before
        assert len(mine) == 2, "there is not one fork server and one form process"
    assert form.num_bytes
    _, left = psutil.wait_procs(mine, timeout=LONG_S)
    assert not left


def test_forms_are_refused_with_the_reason_if_the_process_cannot_start(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        closing(StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})) as forms,
        pytest.raises(BadInput) as refusal,
    ):
        forms.get(Structured(kind="json_object"))
    assert str(refusal.value).startswith("json_object is not accepted: its process does not start: ")


def test_structured_output_of_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(BadInput, match="no tokenizer"):
        prepare_prompt([1], Structured(kind="json_object"), None)


def test_ending_engine_does_not_wait_for_a_starting_process(default_tokenizer: Tokenizer) -> None:
    pytest.importorskip("xgrammar")
    forms = StructuredOutputManager(default_tokenizer, NUM_LOGITS, {2})
    refusals: queue.SimpleQueue[BadInput] = queue.SimpleQueue()

    def ask() -> None:
        with pytest.raises(BadInput) as refusal:
            forms.get(Structured(kind="choice", text=json.dumps(["a", "b"])))
        refusals.put(refusal.value)

    asking, ending = threading.Thread(target=ask, daemon=True), threading.Thread(target=forms.close, daemon=True)
    before = set(psutil.Process().children())
    asking.start()
    deadline_s = time.monotonic() + LONG_S
    while not (new := set(psutil.Process().children()) - before):
        assert time.monotonic() < deadline_s, "no process was started"
        time.sleep(0.005)
    (keeper,) = new
    while not any("structured_output.fork_server" in word for word in keeper.cmdline()):  # its parent waits for that
        assert time.monotonic() < deadline_s, "the process never became itself"
        time.sleep(0.001)
    keeper.suspend()  # a busy machine may give it no time
    ending.start()
    ending.join(LONG_S)
    assert not ending.is_alive(), "closing waited for the starting process"
    refusals.get(timeout=LONG_S)
    assert not keeper.is_running() or keeper.status() == psutil.STATUS_ZOMBIE
