"""Hugging Face ids: from this machine, from a hub (a small one over HTTP), and offline."""

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
    """Environment of a process that uses the small hub."""
    with small_hub(tmp_path / "home") as environment:
        yield os.environ | environment


def download_in_process(repository: str, environment: dict[str, str]) -> tuple[str, list[list[int]], str]:
    """Return the folder or error of a process that downloads `repository`, its progress events, and its standard
    error.
    """
    command = [sys.executable, "-c", ASK, repository]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer, progress = done.stdout.splitlines()
    return answer, json.loads(progress), done.stderr


def test_download_returns_the_folder_and_works_offline_afterwards(hub: dict[str, str]) -> None:
    answer, progress, written = download_in_process("owner/model", hub)
    assert {path.name for path in Path(answer).iterdir()} == {"config.json", "model.safetensors"}
    assert (Path(answer) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1] >= 300_000
    assert written == ""
    again, _, _ = download_in_process("owner/model", hub | {"HF_HUB_OFFLINE": "1"})
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
def test_missing_or_gated_repository_is_reported(hub: dict[str, str], repository: str, error: str) -> None:
    assert download_in_process(repository, hub)[0].startswith(error)


def test_unreachable_hub_is_reported(hub: dict[str, str]) -> None:
    answer, _, _ = download_in_process("owner/model", hub | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert answer == (
        "KvscopeError: model 'owner/model' is not on this machine, and the Hugging Face hub cannot be reached"
        " ([Errno 111] Connection refused)"
    )


def test_offline_mode_is_reported(hub: dict[str, str]) -> None:
    answer, _, _ = download_in_process("owner/model", hub | {"HF_HUB_OFFLINE": "1"})
    assert answer == (
        "KvscopeError: model 'owner/model' is not on this machine,"
        " and HF_HUB_OFFLINE prevents downloads from the Hugging Face hub"
    )


def test_full_disk_is_reported_and_the_download_can_be_repeated(hub: dict[str, str]) -> None:
    answer, _, _ = download_in_process("owner/model", hub | {"MAX_FILE_BYTES": "200000"})
    assert answer == (
        f"KvscopeError: model 'owner/model' cannot be kept in '{hub['HF_HOME']}/hub': File too large; free space on"
        " this disk, fix the folder's permissions, or set HF_HOME to another folder"
    )
    assert download_in_process("owner/model", hub)[0].startswith(hub["HF_HOME"]), "the download must succeed afterwards"


def test_missing_model_offline_is_reported() -> None:
    with pytest.raises(KvscopeError, match="'nobody/nothing' is not on this machine"):
        hub_folder("nobody/nothing", lambda _: None)
