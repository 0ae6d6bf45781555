"""`generate`: prompts in, results out in the given order; refused prompts do not affect others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_telemetry.messages.structured import Structured

Run = Callable[..., tuple[int, str, str]]


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_single_prompt_streams_its_text(run: Run, echo: Any) -> None:
    assert run("generate", "--prompt", "hello") == (0, "[hello]\n", "")
    assert echo.made[0].closed


def test_json_output_has_all_fields(run: Run, echo: Any) -> None:
    code, out, err = run("generate", "--prompt", "ab", "--json", "--max-tokens", "3")
    assert (code, err) == (0, "")
    assert lines(out) == [
        {
            "index": 0,
            "prompt": "ab",
            "prompt_token_ids": [91, 97, 98, 93],
            "token_ids": [91, 97, 98],
            "text": "[ab",
            "finish_reason": "length",
            "usage": {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2},
            "timing": {"queue_s": 0.1, "ttft_s": 0.2, "total_s": 0.3, "stopped_s": 0.0},
        }
    ]


def test_raw_option_of_generate_skips_the_chat_template(run: Run, echo: Any) -> None:
    assert run("generate", "--prompt", "hello", "--raw")[1] == "hello\n"


def test_results_of_several_prompts_come_in_order(run: Run, echo: Any) -> None:
    words = ["--prompt", "a long one", "--prompt", "short", "--prompt", "b"]
    assert [line["prompt"] for line in lines(run("generate", *words, "--json")[1])] == words[1::2]
    text = run("generate", *words)[1]
    assert text == "[1] a long one\n[a long one]\n\n[2] short\n[short]\n\n[3] b\n[b]\n\n"


def test_several_completions_are_numbered(run: Run, echo: Any) -> None:
    found = lines(run("generate", "--prompt", "x", "--prompt", "y", "--n", "2", "--json")[1])
    assert [(line["index"], line["completion"]) for line in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_logprobs_are_included_on_request(run: Run, echo: Any) -> None:
    found = lines(run("generate", "--prompt", "x", "--logprobs", "0", "--json", "--raw")[1])
    assert found[0]["logprobs"] == [{"token_id": 120, "logprob": -0.5, "top": []}]


def test_sampling_options_reach_the_engine(run: Run, echo: Any) -> None:
    run(
        *("generate", "--prompt", "x", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7"),
        *("--min-p", "0.1", "--stop", "a", "--stop", "b", "--max-tokens", "9", "--min-tokens", "2"),
        *("--presence-penalty", "1", "--frequency-penalty", "-1", "--repetition-penalty", "1.5"),
        *("--ignore-eos", "--seed", "11"),
    )
    sampling = echo.made[0].submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.stop, sampling.max_tokens, sampling.min_tokens) == (("a", "b"), 9, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.ignore_eos, sampling.seed) == (1.5, True, 11)
    assert echo.made[0].config.seed == 11


def test_request_options_reach_the_engine(run: Run, echo: Any) -> None:
    run(
        *("generate", "--prompt", "x", "--stop-token-ids", "4,5", "--logit-bias", "7:-100,12:1.5"),
        *("--choice", "yes", "--choice", "no", "--priority", "-3", "--cache-salt", "mine", "--adapter", "sql"),
    )
    submit = echo.made[0].submits[0]
    assert (submit.sampling.stop_token_ids, submit.sampling.logit_bias) == ((4, 5), {7: -100.0, 12: 1.5})
    assert submit.sampling.structured == Structured(kind="choice", text='["yes", "no"]')
    assert (submit.priority, submit.cache_salt, submit.adapter) == (-3, "mine", "sql")


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (["--json-object"], Structured(kind="json_object")),
        (["--regex", "a+"], Structured(kind="regex", text="a+")),
        (["--json-schema", '{"type": "object"}'], Structured(kind="json_schema", text='{"type": "object"}')),
        (["--json-schema", "schema.json"], Structured(kind="json_schema", text='{"type": "array"}')),
        (["--grammar", 'root ::= "a"'], Structured(kind="grammar", text='root ::= "a"')),
        ([], None),
    ],
)
def test_structured_output_option_reaches_the_engine(
    run: Run, echo: Any, words: list[str], form: Structured | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    assert run("generate", "--prompt", "x", *words)[0] == 0
    assert echo.made[0].submits[0].sampling.structured == form


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--json-object", "--regex", "a"], "one form of the answer is accepted, not json_object and regex"),
        (["--json-schema", "nowhere.json"], "'nowhere.json' is neither a text with '{' nor a file that can be read"),
        (["--logit-bias", "a:b"], "'a' is not accepted: must be a whole number"),
        (["--logit-bias", "7"], "'' is not accepted: must be a number"),
        (["--logit-bias", "7:101"], "logit_bias of token 7=101.0 is not accepted"),
        (["--stop-token-ids", "1;2"], "'1;2' is not accepted: must be a whole number"),
        (["--priority", "2000"], "Expected `int` <= 1000"),
    ],
)
def test_contradictory_request_options_are_refused_before_the_engine_starts(
    run: Run, echo: Any, words: list[str], reason: str
) -> None:
    code, _, err = run("generate", "--prompt", "x", *words)
    assert code == 2
    assert reason in err
    assert not echo.made, "the engine must not start"


def test_prompt_file_may_set_request_options(run: Run, echo: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    call = {"id": "c", "name": "f", "arguments": "{}"}
    asked: list[dict[str, Any]] = [
        {"prompt": "a", "json_schema": {"type": "object"}, "logit_bias": {"7": 2, "8": -1.5}, "priority": 5},
        {"prompt": "b", "choice": ["x", "y"], "stop_token_ids": [3], "cache_salt": "s", "adapter": "py"},
        {"prompt": "c", "structured": {"kind": "regex", "text": "a"}, "tools": [{"type": "function"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "d"}]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in asked))
    words = ("--cache-salt", "t", "--adapter", "sql", "--regex", "b", "--logit-bias", "1:1")
    assert run("generate", "--prompts", str(file), *words)[0] == 0
    a, b, c, d = echo.made[0].submits
    assert a.sampling.structured == Structured(kind="json_schema", text='{"type": "object"}')
    assert (a.sampling.logit_bias, a.priority, a.cache_salt) == ({7: 2.0, 8: -1.5}, 5, "t")
    assert (b.sampling.structured, b.sampling.stop_token_ids) == (Structured(kind="choice", text='["x", "y"]'), (3,))
    assert (b.cache_salt, b.sampling.logit_bias) == ("s", {1: 1.0})
    assert [one.adapter for one in (a, b, c, d)] == ["sql", "py", "sql", "sql"]
    assert (c.sampling.structured, json.loads(c.tools)) == (Structured(kind="regex", text="a"), [{"type": "function"}])
    assert d.sampling.structured == Structured(kind="regex", text="b")


def test_prompt_file_entries_can_contain_chat_messages_and_override_sampling_options(
    run: Run, echo: Any, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "max_tokens": 2, "raw": true}\n'
        "\n"
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}], "stop": "x"}\n'
    )
    code, out, _ = run("generate", "--prompt", "first", "--prompts", str(file), "--json", "--max-tokens", "50")
    first, second, third = lines(out)
    assert code == 0
    assert (first["text"], second["text"], third["text"]) == ("[first]", "on", "[s][ü]")
    assert third["prompt"] is None
    assert third["messages"][1] == {"role": "user", "content": "ü"}
    samplings = [submit.sampling for submit in echo.made[0].submits]
    assert [sampling.max_tokens for sampling in samplings] == [50, 2, 50]
    assert samplings[2].stop == ("x",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "exactly one"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": 3}', "Expected `str"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature"),
        ('{"prompt": "a", "temperature": -1}', "temperature=-1"),
        ('{"prompt": "a", "tempreature": 1}', "tempreature"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0"),
        ('{"messages": [{"role": "pope", "content": "a"}]}', "pope"),
        ('{"prompt": "a\xff"}', "utf-8"),
        ("[" * 100_000, ""),
    ],
)
def test_invalid_line_of_a_prompt_file_is_named_and_nothing_runs(
    run: Run, echo: Any, tmp_path: Path, line: str, reason: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n' + line.encode("latin-1") + b"\n")
    code, out, err = run("generate", "--prompts", str(file))
    assert (code, out) == (2, "")
    assert f"{file}, line 2: " in err
    assert reason.lower() in err.lower()
    assert err.count("\n") == 1
    assert not echo.made


@pytest.mark.parametrize(
    "words",
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--n", "65"),
        ("--max-tokens", "0"),
        ("--logprobs", "21"),
        ("--stop", ""),
        ("--repetition-penalty", "inf"),
        ("--seed", str(1 << 64)),
    ],
)
def test_absurd_option_is_refused_before_anything_runs(run: Run, echo: Any, words: tuple[str, str]) -> None:
    code, out, err = run("generate", "--prompt", "a", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not echo.made


@pytest.mark.parametrize("file", ["missing.jsonl", "."])
def test_unreadable_prompt_file_is_refused(run: Run, echo: Any, tmp_path: Path, file: str) -> None:
    code, _, err = run("generate", "--prompts", str(tmp_path / file))
    assert code == 2
    assert "cannot be read" in err


def test_prompt_that_is_not_utf_8_is_refused(run: Run, echo: Any) -> None:
    code, _, err = run("generate", "--prompt", os.fsdecode(b"caf\xe9"))
    assert code == 2
    assert "not valid UTF-8" in err


def test_refused_prompt_is_an_entry_and_the_others_continue(run: Run, echo: Any) -> None:
    words = ("generate", "--prompt", "good", "--prompt", "", "--prompt", "x" * 600, "--prompt", "fine")
    code, out, _ = run(*words, "--json")
    assert code == 2
    found = lines(out)
    assert [line["finish_reason"] for line in found] == ["length", "error", "error", "length"]
    assert "empty" in found[1]["error"]
    assert "63 blocks" in found[2]["error"]
    assert len(found[2]["prompt_token_ids"]) == 602
    assert [found[0]["text"], found[3]["text"]] == ["[good]", "[fine]"]
    code, out, err = run(*words)
    assert code == 2
    assert err.splitlines()[0].startswith("kvscope-engine: prompt 2: ")
    assert "[fine]" in out


def test_ctrl_c_aborts_and_prints_partial_results(run: Run, echo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(
        echo, "__enter__", lambda self: setattr(self, "on_step", lambda step: interrupt(self, step)) or self
    )
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = run("generate", "--prompt", "a", "--prompt", "a long prompt", "--json")
    assert code == 130
    found = lines(out)
    assert [line["finish_reason"] for line in found] == ["length", "abort"]
    assert found[1]["text"] == "[a "
    assert signal.getsignal(signal.SIGINT) is before
    assert echo.made[0].closed


def test_prompt_file_with_a_byte_order_mark_is_accepted(run: Run, echo: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "abc"}).encode() + b"\n")
    assert run("generate", "--prompts", str(file))[0] == 0
    file.write_bytes(json.dumps({"prompt": "abc"}).encode("utf-16"))
    code, _, said = run("generate", "--prompts", str(file))
    assert code == 2
    assert "it is UTF-16; UTF-8 is needed" in said


def test_lone_surrogate_in_a_prompt_file_is_refused(run: Run, echo: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\ud800b"}\n')
    code, _, said = run("generate", "--prompts", str(file))
    assert code == 2
    assert r"line 1: '\ud800' is half of a surrogate pair" in said
