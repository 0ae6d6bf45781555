"""The answer of a memory plan: parts that add up, changes that help, and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from tests.engine.planning.conftest import LLAMA_8B, SMALL, Make

from kvscope_engine.cli.main import main
from kvscope_engine.model.loader.gguf.gguf_entries import MANIFEST, fingerprint
from kvscope_engine.planning.inference_plan import InferenceQuestion, plan_inference
from kvscope_engine.planning.plan_answer import build_answer
from kvscope_engine.planning.plan_report_text import plan_text
from kvscope_engine.planning.skeleton import read_skeleton
from kvscope_engine.planning.training_plan import TrainingQuestion, plan_training
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.memory_plan import PlanAnswer

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("own_cache")


def _planned(skeleton: Make, gib: int, **what: object) -> PlanAnswer:
    model = skeleton(LLAMA_8B)
    question = InferenceQuestion(gpu_memory=gib * GIB, **what)  # type: ignore[arg-type]
    return build_answer(model, plan_inference(model, question), (1024, 999_999))


@pytest.mark.parametrize("gib", [12, 24, 80])
def test_parts_of_a_memory_plan_add_up_to_the_allowed_memory(skeleton: Make, gib: int) -> None:
    answered = _planned(skeleton, gib, enforce_eager=True).inference
    for stage in answered.stages:
        sizes = {part.name: part.num_bytes for part in stage.parts}
        missing = sizes.pop("missing", 0)
        assert sum(sizes.values()) - missing == answered.allowed_bytes
        assert bool(missing) is not answered.fits


def test_options_suggested_by_a_memory_plan_give_the_stated_capacity(skeleton: Make) -> None:
    answered = _planned(skeleton, 24).inference
    assert answered.fits
    assert not answered.holds_longest
    assert [room.num_tokens for room in answered.rooms] == [1024, 131072]
    assert all(change.num_tokens > answered.num_tokens for change in answered.changes)
    options = {change.options: change for change in answered.changes}
    again = _planned(skeleton, 24, kv_cache_dtype="fp8").inference
    assert options["--kv-cache-dtype fp8"].num_tokens == again.num_tokens
    larger = next(name for name in options if name.startswith("--gpu-memory "))
    assert options[larger].num_requests >= 1


def test_plan_command_prints_every_part_of_the_plan(skeleton: Make) -> None:
    model = skeleton(LLAMA_8B | {"num_hidden_layers": 2})
    plan = plan_inference(model, InferenceQuestion(gpu_memory=4 * GIB, pipeline_parallel=2))
    answered = build_answer(model, plan, (1024,), plan_training(model, TrainingQuestion(length=256)))
    said = plan_text(answered)
    assert "stage 1, layers 1 to 1" in said
    assert "Training: " in said
    assert "it does not fit into 4.0 GiB" in said
    assert "--zero 3 --data-parallel-size 8" in said
    assert max(map(len, said.splitlines()[1:])) < 132, "only the first line may be longer: it has the model's name"


def test_plan_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    code = main(["plan", "--model", str(tmp_path), "--gpu-memory", "2GiB", "--others", "1MiB", "--train", "--json"])
    answered = msgspec.json.decode(capsys.readouterr().out, type=PlanAnswer)
    assert code == 0
    assert answered.inference.fits
    assert answered.training is not None
    assert answered.training.fits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu-memory", "lots"], "'lots' is not accepted: must be a size such as 512MiB"),
        ([], "--gpu-memory"),
        (["--gpu-memory", "24GiB", "--lengths", "1,x"], "--lengths '1,x' is not accepted"),
        (["--gpu-memory", "24GiB", "--train", "--zero", "7"], "zero=7 is not accepted"),
        (["--gpu-memory", "24GiB", "--model", "/nowhere"], "'/nowhere' not found"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_command_refuses_invalid_input_in_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_plan_command_with_lines_answers_each_input_line_with_a_plan_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    good = ["--model", str(tmp_path), "--gpu-memory", "2GiB", "--others", "1MiB"]
    lines = [json.dumps(good), "x", json.dumps(["--gpu-memory"]), json.dumps([*good, "--lengths", "7"])]
    said = io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(said, write_through=True))
    assert main(["plan", "--lines"]) == 0
    answers = [json.loads(line) for line in said.getvalue().splitlines()]
    first, whole, no_array, no_size, *last = answers
    assert first["inference"]["fits"]
    assert first["is_first"]
    assert first["inference"]["changes"] == []
    assert whole["inference"]["changes"]
    assert {**first["inference"], "changes": []} == {**whole["inference"], "changes": []}
    assert not whole.get("is_first")
    assert "no JSON array of options" in no_array["error"]
    assert "--gpu-memory" in no_size["error"]
    assert [each["inference"]["rooms"][0]["num_tokens"] for each in last] == [7, 7]


def test_converted_file_is_planned_without_reading_its_header_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, folder = tmp_path / "m.gguf", tmp_path / "entry"
    gguf.write_bytes(b"GGUF, as far as anybody looks")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    (folder / MANIFEST).write_text(json.dumps({"config.json": fingerprint(folder / "config.json")}))
    monkeypatch.setattr("kvscope_engine.model.loader.gguf.gguf_cache.entry_folder", lambda *_: folder)
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    assert read_skeleton(str(gguf)).num_parameters == read_skeleton(str(folder)).num_parameters
    (folder / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="not accepted"):
        read_skeleton(str(gguf))
