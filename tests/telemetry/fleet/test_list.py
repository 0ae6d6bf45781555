"""Lists of addresses: what is accepted, and that what cannot be read leaves the last list as it was."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.entries import MAX_ENTRIES, parse_list
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


def test_a_line_for_all_ranks():
    read = parse_list("vllm://gpu-box:8000/?ranks=3 box\nvllm://gpu-box:8000/?rank=1\nvllm://other:1/?ranks=0\n")
    texts = [f"vllm://gpu-box:8000/?rank={rank}" for rank in range(3)]
    assert [(entry.address.text, entry.name) for entry in read.entries] == [(text, "box") for text in texts]
    assert "line 3: ranks='0' is not accepted" in read.trouble


def test_an_address_a_line_with_a_name_if_one_likes():
    read = parse_list(f"# ours\n\n{ONE}\n  {TWO}   box   two  # the second\n{ONE} again\n")
    assert [(entry.address.text, entry.name) for entry in read.entries] == [(ONE, ""), (TWO, "box two")]
    assert read.trouble == ""


def test_keys_are_for_other_engines_and_never_shown():
    own, other = parse_list(f"{ONE}\n{TWO}&tls=1", api_key="sk-secret").entries
    assert (own.address.api_key, other.address.api_key) == ("", "sk-secret")
    assert "sk-secret" not in repr((own, other))


def test_what_is_not_accepted_is_left_out_and_said():
    read = parse_list(f"http://box:1\n{ONE}\ngarbage\n")
    assert len(read.entries) == 1
    assert "line 1" in read.trouble
    assert "'http://box:1'" in read.trouble
    assert "1 more line" in read.trouble


def test_ten_thousand_lines_are_bounded_with_a_word():
    read = parse_list("\n".join(f"tcp://127.0.0.1:{port}" for port in range(10_000, 20_000)))
    assert len(read.entries) == MAX_ENTRIES
    assert f"{10_000 - MAX_ENTRIES:,} addresses ignored" in read.trouble


def test_rubbish_is_no_list_but_nothing_is_an_empty_one():
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
def test_commands_that_go_wrong(code, word):
    limit_s = 0.5 if "sleep" in code else WAIT_S
    command = CommandText(f'{sys.executable} -c "{code}"', limit_s=limit_s)
    with pytest.raises(BadInput, match=word):
        read(command)


def test_a_command_that_is_not_there_or_cannot_be_split():
    with pytest.raises(BadInput, match="'no-such-command' cannot be run: No such file"):
        read(CommandText("no-such-command"))
    for command in ("", "echo 'open"):
        with pytest.raises(BadInput, match="is not accepted"):
            CommandText(command)


def test_no_shell_reads_a_command():
    assert read(CommandText("echo $HOME; echo `id` | cat")) == "$HOME; echo `id` | cat\n"
    assert read(CommandText("sh -c 'echo a; echo b | cat'")) == "a\nb\n"


def test_a_stopped_command_ends_soon():
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(BadInput, match="stopped"):
        CommandText("sleep 600").read(stopped)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "large").write_bytes(b"#" * (MAX_LIST_BYTES + 1))
    for name, word in (("none", "No such file"), ("", "is not a file"), ("large", "more than 1 MiB")):
        with pytest.raises(BadInput, match=word):
            read(FileText(tmp_path / name))


def test_the_last_list_stays_when_it_cannot_be_read_again(tmp_path):
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
    assert len(lists) == 2  # the same list is told once
