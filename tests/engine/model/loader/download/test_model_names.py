"""Every form of a model name, and invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_engine.model.loader.download.model_names import parse_model_name
from kvscope_telemetry.errors import BadInput


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "file.gguf").write_bytes(b"")
    (tmp_path / "file.bin").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        ("default", "default", ""),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "hub", ""),
        ("gpt2", "hub", ""),
        ("{}/folder", "folder", "folder"),
        ("{}/file.gguf", "gguf", "file.gguf"),
        ("dummy:{}/folder/config.json", "dummy", "folder/config.json"),
        ("dummy:{}/folder", "dummy", "folder/config.json"),
    ],
)
def test_model_name_of_each_form_is_parsed(models: Path, text: str, kind: str, path: str) -> None:
    name = parse_model_name(text.format(models))
    assert name.kind == kind
    assert name.path == (models / path if path else Path())


@pytest.mark.parametrize(
    "text",
    [
        "{}/nothing",
        "{}/nothing.gguf",
        "{}/file.bin",
        "dummy:{}/nothing.json",
        "dummy:",
        "./nothing",
        "a/b/c",
        "a b",
        "OWNER/",
        "-x",
        "a/..",
        "~nobody-of-that-name/x",
        "\x00",
    ],
)
def test_invalid_model_name_is_refused(models: Path, text: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_model_name(text.format(models))
    assert "\n" not in str(refused.value)
    assert repr(text.format(models)) in str(refused.value)


def test_home_folder_is_expanded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(models))
    assert parse_model_name("~/folder").path == models / "folder"
