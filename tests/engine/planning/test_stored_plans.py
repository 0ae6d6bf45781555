"""Plans that were computed before are read from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.planning.conftest import SMALL

from kvscope_engine.cli.main import main
from kvscope_engine.planning.stored_plans import plan_identity
from kvscope_telemetry.errors import BadInput

Ask = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    return config


@pytest.fixture
def ask(config: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*options: str) -> str:
        assert main(["plan", "--model", str(config), "--gpu-memory", "4GiB", "--json", *options]) == 0
        return capsys.readouterr().out

    return ask


@pytest.fixture
def plans(config: Path) -> Callable[[], list[Path]]:
    return lambda: list((config.parent / "cache" / "plans").glob("*.json"))


def test_second_answer_to_a_question_is_equal_and_does_not_import_torch(ask: Ask, config: Path) -> None:
    answer = ask()
    command = ["plan", "--model", str(config), "--gpu-memory", "4GiB", "--json"]
    script = (
        f"import sys; from kvscope_engine.cli.main import main; main({command!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ}, capture_output=True, text=True)
    assert (done.stderr, done.stdout, done.returncode) == ("", answer, 0)


def test_other_options_or_another_configuration_are_planned_again(
    ask: Ask, config: Path, plans: Callable[[], list[Path]]
) -> None:
    answers = {ask(), ask("--block-size", "32"), ask("--train")}
    config.write_text(json.dumps(SMALL | {"num_hidden_layers": 1}))
    answers.add(ask())
    assert len(answers) == len(plans()) == 4


@pytest.mark.parametrize("content", ["{", '{"identity": "", "value": 1}', None])
def test_damaged_plan_is_computed_again(ask: Ask, plans: Callable[[], list[Path]], content: str | None) -> None:
    answer = ask()
    (path,) = plans()
    entry = json.loads(path.read_text())
    path.write_text(content or json.dumps(entry | {"value": [{"name": 1}]}))
    assert ask() == answer
    assert json.loads(path.read_text()) == entry


@pytest.mark.usefixtures("config")
def test_plans_of_models_on_the_hub_are_not_stored_and_bad_names_are_refused() -> None:
    assert plan_identity("owner/name", {}) == ""
    with pytest.raises(BadInput):
        plan_identity("./nowhere", {})
