"""Lists of addresses: accepted lines, and that an unreadable list leaves the previous one in place."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet_list import MAX_ENTRIES, parse_list
from kvscope_telemetry.fleet.list_reader import ListReader
from kvscope_telemetry.fleet.list_texts import MAX_LIST_BYTES, CommandText, FileText

WAIT_S = 60.0
ONE = "ipc:///tmp/one/telemetry"
TWO = "vllm://gpu-box:8000/?rank=1"


def read(text):
    return text.read(threading.Event())


def python(code):
    return CommandText(f"{sys.executable} -c {code!r}")


def wait_for(is_so):
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_line_with_ranks_expands_to_one_entry_per_rank():
    read = parse_list("vllm://gpu-box:8000/?ranks=3 box\nvllm://gpu-box:8000/?rank=1\nvllm://other:1/?ranks=0\n")
    texts = [f"vllm://gpu-box:8000/?rank={rank}" for rank in range(3)]
    assert [(entry.address.text, entry.name) for entry in read.entries] == [(text, "box") for text in texts]
    assert "line 3: ranks='0' is not accepted" in read.trouble


def test_line_is_an_address_with_an_optional_name():
    read = parse_list(f"# ours\n\n{ONE}\n  {TWO}   box   two  # the second\n{ONE} again\n")
    assert [(entry.address.text, entry.name) for entry in read.entries] == [(ONE, ""), (TWO, "box two")]
    assert read.trouble == ""


def test_api_key_is_used_for_other_engines_only_and_never_shown():
    own, other = parse_list(f"{ONE}\n{TWO}&tls=1", api_key="sk-secret").entries
    assert (own.address.api_key, other.address.api_key) == ("", "sk-secret")
    assert "sk-secret" not in repr((own, other))


def test_invalid_lines_are_skipped_and_reported():
    read = parse_list(f"http://box:1\n{ONE}\ngarbage\n")
    assert len(read.entries) == 1
    assert "line 1" in read.trouble
    assert "'http://box:1'" in read.trouble
    assert "1 more line" in read.trouble


def test_number_of_entries_is_bounded_and_reported():
    read = parse_list("\n".join(f"tcp://127.0.0.1:{port}" for port in range(10_000, 20_000)))
    assert len(read.entries) == MAX_ENTRIES
    assert f"{10_000 - MAX_ENTRIES:,} addresses ignored" in read.trouble


def test_list_without_any_address_is_refused_and_an_empty_list_is_not():
    with pytest.raises(BadInput, match="there is no address in it: line 1"):
        parse_list("<html>\n<body>502 Bad Gateway</body>\n")
    assert parse_list("# nobody today\n").entries == ()


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("import sys; sys.exit('no such cluster')", r"failed \(exit code 1\): no such cluster"),
        ("import time; time.sleep(600)", "did not finish within 0.5 s"),
        ("import os, time; os.close(1); os.close(2); time.sleep(600)", "did not finish within 0.5 s"),
        ("while True: print('x' * 10000)", "prints more than 1 MiB"),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254, 0]))", "is not text"),
    ],
)
def test_failure_of_the_fleet_list_command_is_explained(code, word):
    limit_s = 0.5 if "sleep" in code else WAIT_S
    command = CommandText(f'{sys.executable} -c "{code}"', limit_s=limit_s)
    with pytest.raises(BadInput, match=word):
        read(command)


def test_missing_or_unparsable_list_command_is_refused():
    with pytest.raises(BadInput, match="'no-such-command' cannot be run: No such file"):
        read(CommandText("no-such-command"))
    for command in ("", "echo 'open"):
        with pytest.raises(BadInput, match="is not accepted"):
            CommandText(command)


def test_list_command_is_run_without_a_shell():
    assert read(CommandText("echo $HOME; echo `id` | cat")) == "$HOME; echo `id` | cat\n"
    assert read(CommandText("sh -c 'echo a; echo b | cat'")) == "a\nb\n"


def test_stopped_list_command_ends_soon():
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(BadInput, match="stopped"):
        CommandText("sleep 600").read(stopped)


def test_unreadable_list_file_is_refused(tmp_path):
    (tmp_path / "large").write_bytes(b"#" * (MAX_LIST_BYTES + 1))
    for name, word in (("none", "No such file"), ("", "is not a file"), ("large", "more than 1 MiB")):
        with pytest.raises(BadInput, match=word):
            read(FileText(tmp_path / name))


def test_fleet_list_that_becomes_unreadable_keeps_the_previous_engines(tmp_path):
    path, lists = tmp_path / "list", []
    path.write_text(ONE)
    reader = ListReader(FileText(path), 0.02, lists.append)
    try:
        wait_for(lambda: len(lists) == 1)
        path.unlink()
        wait_for(lambda: reader.listed.is_old)
        assert [entry.address.text for entry in reader.listed.entries] == [ONE]
        assert "No such file" in reader.listed.trouble
        other = tmp_path / "other"
        other.write_text(f"{ONE}\n{TWO}\n")
        other.rename(path)
        wait_for(lambda: len(lists) == 2)
        assert [entry.address.text for entry in lists[1]] == [ONE, TWO]
        wait_for(lambda: not reader.listed.is_old)
        assert reader.listed.trouble == ""
    finally:
        reader.close()
    assert len(lists) == 2  # an unchanged list is reported once
