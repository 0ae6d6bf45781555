"""Tests of the options of the `kvscope` command line and of its one-line errors."""

from __future__ import annotations

import re

import pytest

from kvscope_app.command_line import parse
from kvscope_telemetry.alarms.rules import DEFAULT_RULES
from kvscope_telemetry.errors import BadInput


def test_command_line_without_arguments_gives_defaults():
    options = parse([])
    assert options.attach == ()
    assert options.engine == ()
    assert options.theme is None


def test_engine_options_of_the_desktop_command_line_are_passed_to_the_engine():
    options = parse(["--model", "a b.gguf", "--max-num-seqs", "8", "--no-enable-prefix-caching", "--kv-memory=1.5GB"])
    assert options.engine == ("--model=a b.gguf", "--kv-memory=1.5GB", "--no-enable-prefix-caching", "--max-num-seqs=8")
    assert parse(["-tp", "2", "--enforce-eager"]).engine == ("--tensor-parallel-size=2", "--enforce-eager")
    assert parse(["--attention-backend", "FLASH_ATTN"]).engine == ("--attention-backend=FLASH_ATTN",)


def test_attach_option_can_be_repeated():
    options = parse(["--attach", "ipc:///tmp/a/telemetry", "--attach", "tcp://127.0.0.1:5555"])
    assert [address.text for address in options.attach] == ["ipc:///tmp/a/telemetry", "tcp://127.0.0.1:5555"]


def test_at_option_sets_the_time_at_which_a_recording_opens():
    assert parse(["--open", "a.mcap", "--at", "12.5"]).at_s == 12.5
    assert parse(["--open", "a.mcap"]).at_s is None


@pytest.mark.parametrize("wrong", ["-1", "soon", "nan", "inf"])
def test_invalid_at_option_is_refused_with_its_value(wrong):
    with pytest.raises(BadInput, match=wrong):
        parse(["--open", "a.mcap", f"--at={wrong}"])
    with pytest.raises(BadInput, match="--open"):
        parse(["--at", "3"])


def test_select_option_is_parsed_as_kind_and_number():
    options = parse(["--open", "a.mcap", "--select", "request:7", "--select", "block:123"])
    assert options.selects == (("request", 7), ("block", 123))


@pytest.mark.parametrize("wrong", ["7", "request:", "request:-7", "step:3", "block:1.5", "block:²"])
def test_invalid_select_option_is_refused(wrong):
    with pytest.raises(BadInput, match="request:NUMBER or block:NUMBER"):
        parse(["--open", "a.mcap", f"--select={wrong}"])
    with pytest.raises(BadInput, match="--select needs --open"):
        parse(["--select", "block:3"])


def test_open_option_can_be_repeated():
    assert parse(["--open", "a.mcap", "--open", "b.mcap"]).recordings == ("a.mcap", "b.mcap")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--block-size", "0"], "'0' is not accepted: must be a whole number from 1 to 1024"),
        (["--block-size", "ten"], "'ten'"),
        (["--gpu-memory-utilization", "nan"], "'nan'"),
        (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        (["--dtype", "int3"], "one of auto, float32"),
        (["--kv-memory", "lots"], "512MiB"),
        (["--kv-memory", "0"], "'0'"),
        (["--model", " "], "a name, a folder or a file"),
        (["--max-num-seqs", "9" * 30], "whole number"),
        (["--kv-events-config", '{"port": 1}'], "--kv-events-config: field 'port' is not known"),
        (["--speculative-config", "ngram"], "--speculative-config: 'ngram' is not accepted: a JSON object is expected"),
        (["--nonsense"], "--nonsense"),
        (["--mod", "x"], "--mod"),
        (["--theme", "pink"], "pink"),
        (["--attach", "http://x"], "http://x"),
        (["--attach", "tcp://192.0.2.1:7710"], "without a key file"),
        (["--attach", "tcp://192.0.2.1:7710", "--key", "none"], "without a key file"),
        (["--attach", "tcp://127.0.0.1:7710", "--key", "/nowhere/x.key"], "/nowhere/x.key cannot be read"),
        (["--key", "x.key"], "--key applies to attached engines"),
        (["--attach", "ipc://relative"], "ipc://relative"),
        (["--attach", "ipc:///tmp/a", "--model", "x"], "--model"),
        (["--attach", "ipc:///tmp/a", "--keep-engine"], "--keep-engine"),
        (["--open", "a.mcap", "--attach", "ipc:///tmp/a"], "cannot be used with --attach"),
        (["--open", "a.mcap", "--model", "x"], "--model applies to the engine that kvscope starts"),
        (["--open", "a.mcap", "--keep-engine"], "--keep-engine"),
        (["--open"], "--open"),
        (["extra"], "extra"),
    ],
)
def test_invalid_option_is_refused_with_its_value(arguments, named):
    with pytest.raises(BadInput) as raised:
        parse(arguments)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_print_and_exit_with_0(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([flag])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "kvscope" in printed
    if flag == "--version":
        assert len(printed.splitlines()) == 1


def test_alarm_options_are_parsed_as_rules():
    options = parse(["--alarm", "Slow: ttft_p99_ms > 500 for 10 s", "--alarm-webhook", "https://host/x"])
    (rule,) = options.alarms
    assert (rule.name, rule.expression, rule.seconds) == ("Slow", "ttft_p99_ms > 500", 10.0)
    assert options.alarm_webhook == "https://host/x"
    assert parse(["--alarm-webhook", "https://host/x"]).alarms == ()  # saved rules apply as well
    assert parse(["--alarm", "default"]).alarms == DEFAULT_RULES


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--alarm", "ttft > 500"], "--alarm 'ttft > 500': 'ttft' is not a figure"),
        (["--alarm", "running > 3", "--alarm", "running > 3"], "there are two of this name"),
        (["--alarm-webhook", "file:///x"], "webhook 'file:///x' is not accepted: http://HOST/"),
    ],
)
def test_invalid_alarm_options_are_refused(arguments, named):
    with pytest.raises(BadInput, match=re.escape(named)):
        parse(arguments)
