"""The disk file that one start of the command line keeps is used by the next start with the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope_engine.cli.main import main

Asked = tuple[list[list[int]], int, str]
"""Tokens of each prompt, the number of cached tokens of the first, and the standard error output."""


@pytest.fixture
def generate_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Asked]:
    """Function that runs `generate` with a kept file and two long prompts, the second of which evicts the first."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    lines = [json.dumps({"prompt": text[low : low + 1200]}) for low in (500, 3000)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))

    def run(*words: str) -> Asked:
        capfd.readouterr()
        sizes = ("--kv-memory", "14MiB", "--max-num-seqs", "1", "--dtype", "float32")
        options = ("--json", "--max-tokens", "4", "--temperature", "0", "--kv-disk-keep")
        prompts = ("--prompts", str(tmp_path / "prompts.jsonl"))
        tiers = ("--kv-host-memory", "3MiB", "--kv-disk", "32MiB", "--kv-disk-path", str(tmp_path / "tier"))
        code = main(["generate", *prompts, *sizes, *options, *tiers, *words])
        out, err = capfd.readouterr()
        assert code == 0, err
        answers = [json.loads(line) for line in out.splitlines()]
        return [answer["token_ids"] for answer in answers], answers[0]["usage"]["cached_tokens"], err

    return run


def test_second_start_uses_the_kept_disk_file(generate_again: Callable[..., Asked], tmp_path: Path) -> None:
    tokens, cached, notes = generate_again()
    assert (cached, notes) == (0, "")
    again, cached, notes = generate_again()
    assert (again, notes) == (tokens, "")
    assert cached > 100
