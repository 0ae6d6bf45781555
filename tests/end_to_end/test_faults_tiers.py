"""The lower tiers on the real command line: what is refused, reported and kept, and what a kill leaves."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.warm_python import WarmPython

from kvscope_engine.cli.main import main
from kvscope_engine.model.kv_cache.kv_offload.disk_index import IndexRequirements, read_index

BAD_INPUT = 2
MIB = 1 << 20
Words = tuple[str, ...]
Refused = Callable[..., str]
Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder for temporary files of the disk tier."""
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tiny_model: Callable[..., str]) -> Words:
    return ("--model", tiny_model(), "--dtype", "float32", "--block-size", "4", "--num-gpu-blocks-override", "64")


@pytest.fixture
def error_line_of(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Function that runs a command that must fail with `code`, and returns its only line: `error_line_of(code,
    *words)`.
    """

    def run(code: int, *words: str) -> str:
        capfd.readouterr()
        found = main(words)
        out, err = capfd.readouterr()
        assert found == code, err
        assert out == "" or out.startswith("listening on")
        assert err.count("\n") == 1, err
        assert err.startswith("kvscope-engine: ")
        assert "Traceback" not in err
        assert len(err) < 600
        return err

    return run


def tier_options(path: str, host_size: str = "128KiB", size: str = "1MiB") -> Words:
    """Return options of both lower tiers."""
    return ("--kv-host-memory", host_size, "--kv-disk", size, "--kv-disk-path", path)


# Refused before anything is allocated.


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--allocator", "pagd"), "'pagd' is not accepted: must be one of paged, contiguous, buddy, virtual"),
        (("--allocator", "oracle"), "'oracle'"),
        (("--preemption", "swp"), "'swp' is not accepted: must be one of auto, recompute, swap"),
        (("--preemption", "swap"), "preemption='swap' is not accepted without host memory to swap to"),
        (("--kv-host-memory", "lots"), "'lots'"),
        (("--kv-host-memory", "-1"), "--kv-host-memory"),
        (
            ("--kv-disk", "1GiB"),
            "disk_kv_memory_bytes=1073741824 (--kv-disk) is not accepted without host memory above it",
        ),
        (("--kv-host-memory", "1MiB", "--kv-disk-path", "tier"), "disk_kv_path='tier' is not accepted without a size"),
        (("--kv-host-memory", "1MiB", "--kv-disk", "1MiB", "--kv-disk-keep"), "without a file to keep"),
        (
            ("--kv-host-memory", "1MiB", "--allocator", "contiguous", "--no-enable-prefix-caching"),
            "host_kv_memory_bytes=1048576 is not accepted with allocator='contiguous'",
        ),
        (("--kv-host-memory", "900TiB"), "--kv-host-memory asks for 943718400 MiB of host memory: "),
        (("--kv-host-memory", "1B"), "--kv-host-memory 1 is not accepted: one block takes"),
        (("--kv-host-memory", "1MiB", "--kv-disk", "900TiB"), "--kv-disk asks for 943718"),
        (("--kv-host-memory", "1MiB", "--kv-disk", "1B"), "--kv-disk 1 is not accepted: one block takes"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_invalid_tier_options_are_named(
    error_line_of: Refused, model: Words, socket_folder: Path, command: str, words: Words, named: str
) -> None:
    begin = ("serve", "--endpoint", f"ipc://{socket_folder}") if command == "serve" else ("generate", "--prompt", "x")
    assert named in error_line_of(BAD_INPUT, *begin, *model, *words)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("folder", "Is a directory"),
        ("nowhere/tier", "No such file or directory"),
        ("letter.txt", "it has 5 bytes that kvscope did not write (there is no letter.txt.index beside it)"),
        ("letter.txt/tier", "Not a directory"),
        ("pipe", "it is not a regular file"),
        ("loop", "loop"),
        ("n" * 300, "File name too long"),
        ("/dev/full", "it is not a regular file"),
        ("/proc/tier", "/proc/tier"),
        ("", "'' is not accepted"),
    ],
    ids=lambda name: name[:20],
)
def test_disk_tier_path_that_cannot_be_a_regular_file_is_refused_and_left_unchanged(
    error_line_of: Refused, model: Words, tmp_path: Path, name: str, named: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "letter.txt").write_text("hello")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    before = {*tmp_path.iterdir(), tmp_path / "cache"}
    path = str(tmp_path / name) if name else ""
    assert named in error_line_of(BAD_INPUT, "generate", "--prompt", "x", *model, *tier_options(path))
    assert {*tmp_path.iterdir(), tmp_path / "cache"} == before
    assert (tmp_path / "letter.txt").read_text() == "hello"


def test_unwritable_index_leaves_no_file(error_line_of: Refused, model: Words, tmp_path: Path) -> None:
    (tmp_path / "tier.index").mkdir()
    line = error_line_of(
        BAD_INPUT, "generate", "--prompt", "x", *model, *tier_options(str(tmp_path / "tier")), "--kv-disk-keep"
    )
    assert "cannot write" in line
    assert not (tmp_path / "tier").exists()


def test_read_only_folder_is_refused(model: Words, tmp_path: Path, warm_python: WarmPython) -> None:
    """The test runs as a user without the permission; the superuser can write everywhere."""
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    run = warm_python.run(["generate", "--prompt", "x", *model, *tier_options(str(folder / "tier"))])
    assert run.returncode == BAD_INPUT
    assert run.stderr.endswith("Permission denied\n")


def test_disk_tier_larger_than_the_file_size_limit_is_refused_naming_ulimit(
    error_line_of: Refused, model: Words, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
    try:
        line = error_line_of(BAD_INPUT, "generate", "--prompt", "x", *model, *tier_options(str(tmp_path / "tier")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the limit on file sizes is 0 MiB (ulimit -f)" in line or "the limit on file sizes is 1 MiB" in line
    assert list(tmp_path.glob("tier*")) == []


# A serving process: a second one, a kill, and a file that disappears.


def test_kept_file_serves_one_engine_and_is_not_reused_after_a_kill(
    error_line_of: Refused, model: Words, start_engine: Start, connect_client: Any, tmp_path: Path, own_cache: Path
) -> None:
    path = tmp_path / "tier"
    options = (*model, *tier_options(str(path)), "--kv-disk-keep", "--preemption", "swap")
    engine = start_engine(*options)
    talk = connect_client(engine)
    run_requests(talk, "first", range(30))
    line = error_line_of(BAD_INPUT, "generate", "--prompt", "x", *options)
    assert f"--kv-disk-path '{path}' is in use by another engine" in line
    assert talk.source.mirror.counters.offloaded_blocks > 64, "beyond host memory"
    engine.kill()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["cache", "tier", "tier.index"] or not own_cache.exists()
    assert not own_cache.exists() or {item.name for item in own_cache.iterdir()} <= {
        "device_limits.json",
        "transformers",
    }
    index, reason = read_index(tmp_path / "tier.index", IndexRequirements("", 4, 1 << 20), path.stat().st_size)
    assert (index, reason) == (None, "is of another model or layout"), "a whole index"
    again = start_engine(*options)
    late = connect_client(again)
    assert late.source.mirror.num_cached == 0
    before = {name: talk.token_ids(name) for name in talk.finished()}
    run_requests(late, "first", range(3))
    assert {name: late.token_ids(name) for name in late.finished()}.items() <= before.items()


@pytest.mark.storm({"how": "deleted"})
@pytest.mark.parametrize("how", ["deleted", "replaced", "cut"])
def test_lost_disk_file_changes_no_tokens_and_is_reported(
    model: Words, start_engine: Start, connect_client: Any, tmp_path: Path, how: str
) -> None:
    """Requests end with the same tokens as before, an event says that the tier is off, and the engine ends in order."""
    path = tmp_path / "tier"
    engine = start_engine(*model, *tier_options(str(path)), "--kv-disk-keep", "--preemption", "swap")
    talk = connect_client(engine)
    run_requests(talk, "a", range(12))
    if how == "cut":
        os.truncate(path, 4096)
    else:
        path.unlink()
    if how == "replaced":
        path.write_bytes(b"another's")
    run_requests(talk, "b", range(12))
    assert [talk.token_ids(f"b{number}") for number in range(12)] == [
        talk.token_ids(f"a{number}") for number in range(12)
    ]
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(240) == 0
    stderr = engine.process.stderr.read()
    if how == "cut":
        assert talk.source.mirror.counters.lost_blocks > 0
    else:
        assert f"the disk tier was given up: {path} was removed or replaced" in stderr
        assert "the KV cache's file is not kept" in stderr
    if how == "replaced":
        assert path.read_bytes() == b"another's"


def run_requests(talk: Any, prefix: str, numbers: range) -> None:
    """Run requests of 90 tokens and more, whose prefixes are cached the second time, and wait until all ended."""
    for number in numbers:
        ids = random.Random(number).choices(range(3, 256), k=60 + number)
        talk.submit_ids(f"{prefix}{number}", ids, max_tokens=30)
    talk.wait_for(lambda: {f"{prefix}{number}" for number in numbers} <= set(talk.finished()))
