"""Hugging Face ids: from this machine, from a hub (a small one of our own, over HTTP), and without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.model.loader.download.small_hub import FILES, small_hub

from kvscope_engine.model.loader.download.hub import hub_folder
from kvscope_telemetry.errors import KvscopeError

ASK = """
import json, os, resource, sys
if limit := int(os.environ.get("MAX_FILE_BYTES", "0")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from kvscope_engine.model.loader.download.hub import hub_folder
from kvscope_telemetry.errors import KvscopeError
heard = []
try:
    print(hub_folder(sys.argv[1], heard.append))
except KvscopeError as error:
    print(f"{type(error).__name__}: {error}")
print(json.dumps([[progress.done, progress.total] for progress in heard]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks a hub."""
    with small_hub(tmp_path / "home") as environment:
        yield os.environ | environment


def ask(repository: str, environment: dict[str, str]) -> tuple[str, list[list[int]], str]:
    """Answer or error of a process that wants `repository`, the progress it heard, and its standard error."""
    command = [sys.executable, "-c", ASK, repository]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer, progress = done.stdout.splitlines()
    return answer, json.loads(progress), done.stderr


def test_a_download(hub: dict[str, str]) -> None:
    answer, progress, written = ask("owner/model", hub)
    assert {path.name for path in Path(answer).iterdir()} == {"config.json", "model.safetensors"}
    assert (Path(answer) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1] >= 300_000
    assert written == ""
    again, _, _ = ask("owner/model", hub | {"HF_HUB_OFFLINE": "1"})
    assert again == answer


@pytest.mark.parametrize(
    ("repository", "error"),
    [
        (
            "owner/nothing",
            "BadInput: model 'owner/nothing' not found: no such folder, and no such id on the",
        ),
        ("owner/closed", "BadInput: model 'owner/closed' is gated: accept its licence at http://127.0.0.1:"),
        ("owner/empty", "BadInput: model 'owner/empty' is not accepted: it is empty on the Hugging Face hub"),
        (
            "owner/broken",
            "KvscopeError: model 'owner/broken' is not on this machine, and the Hugging Face hub",
        ),
    ],
)
def test_what_the_hub_does_not_give(hub: dict[str, str], repository: str, error: str) -> None:
    assert ask(repository, hub)[0].startswith(error)


def test_a_hub_that_cannot_be_reached(hub: dict[str, str]) -> None:
    answer, _, _ = ask("owner/model", hub | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert answer == (
        "KvscopeError: model 'owner/model' is not on this machine, and the Hugging Face hub cannot be reached"
        " ([Errno 111] Connection refused)"
    )


def test_a_hub_that_is_not_to_be_asked(hub: dict[str, str]) -> None:
    answer, _, _ = ask("owner/model", hub | {"HF_HUB_OFFLINE": "1"})
    assert answer == (
        "KvscopeError: model 'owner/model' is not on this machine,"
        " and HF_HUB_OFFLINE forbids to ask the Hugging Face hub"
    )


def test_no_room_for_it(hub: dict[str, str]) -> None:
    answer, _, _ = ask("owner/model", hub | {"MAX_FILE_BYTES": "200000"})
    assert answer == (
        f"KvscopeError: model 'owner/model' cannot be kept in '{hub['HF_HOME']}/hub': File too large; free space or fix"
        " permissions there, or set HF_HOME to another folder"
    )
    assert ask("owner/model", hub)[0].startswith(hub["HF_HOME"]), "and another time it comes"


def test_offline_and_not_here() -> None:
    with pytest.raises(KvscopeError, match="'nobody/nothing' is not on this machine"):
        hub_folder("nobody/nothing", lambda _: None)
