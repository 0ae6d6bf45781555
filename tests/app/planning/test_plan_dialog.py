"""Tests of the plan dialog: it sends its form to a child process and shows the answer."""

import re
import sys
from pathlib import Path

import msgspec
import pytest
from PySide6.QtWidgets import QWidget
from shiboken6 import isValid
from tests.processes import RUNS_ENGINE

from kvscope_app.planning.plan_dialog import PlanDialog
from kvscope_app.planning.plan_process import PlanProcess
from kvscope_app.planning.plan_view import PlanView
from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import DARK, LIGHT, SAFE_DARK, SAFE_LIGHT
from kvscope_app.views.memory.stacked_bar import Swatch
from kvscope_telemetry.messages.memory_plan import (
    Change,
    Headroom,
    InferenceAnswer,
    PlanAnswer,
    PlanPart,
    StageUse,
    TrainingAnswer,
)

GIB = 1 << 30
CHILD = """
import json, sys
answer = open(sys.argv[1]).read()
for line in sys.stdin:
    options = json.loads(line)
    if "--model=wrong" in options:
        print(json.dumps({"error": "model 'wrong' is not there"}), flush=True)
    elif "--model=dies" in options:
        sys.exit("kvscope-engine: it is dead")
    else:
        told = json.loads(answer)
        told["architecture"] = next(o for o in options if o.startswith("--model")).partition("=")[2]
        if "--train" not in options:
            told["training"] = None
        if "--model=slow" in options:
            print(json.dumps({**told, "is_first": True, "inference": {**told["inference"], "changes": []}}), flush=True)
            sys.stdin.readline()
        print(json.dumps(told), flush=True)
"""


def _make_answer(*, fits=True):
    parts = (
        PlanPart(name="weights", num_bytes=15 * GIB, how="parameters in bfloat16"),
        PlanPart(name="KV cache", num_bytes=4 * GIB, how="2,089 blocks"),
        *([] if fits else [PlanPart(name="missing", num_bytes=GIB)]),
    )
    change = Change(options="--kv-cache-dtype fp8", num_tokens=66_000, num_requests=2, fits=True, note="8 bits")
    training = TrainingAnswer(
        gpu_bytes=24 * GIB, fits=False, parts=parts[:1], peak_bytes=120 * GIB, worst="backward", changes=()
    )
    serving = InferenceAnswer(
        gpu_bytes=24 * GIB,
        allowed_bytes=21 * GIB,
        num_gpus=1,
        fits=fits,
        holds_longest=fits,
        max_model_len=8192,
        block_size=16,
        block_bytes=2 << 20,
        kv_bytes_a_token=131072.0,
        num_blocks=2089,
        num_host_blocks=0,
        num_tokens=33_424,
        rooms=(Headroom(num_tokens=1024, num_requests=32),),
        stages=(StageUse(number=0, first_layer=0, num_layers=32, parts=parts, num_blocks=2089),),
        changes=(change,),
        notes=("a request of 8,192 tokens holds 1.0 GiB",),
    )
    return PlanAnswer(
        model="m", architecture="", num_parameters=8_030_000_000, modules=(), inference=serving, training=training
    )


@pytest.fixture
def make_dialog(qtbot, tmp_path):
    sheets = []

    def make(model="Some", *, fits=True, theme=DARK):
        (tmp_path / "answer.json").write_bytes(msgspec.json.encode(_make_answer(fits=fits)))
        (tmp_path / "child.py").write_text(CHILD)
        parent = QWidget()
        qtbot.addWidget(parent)
        command = [sys.executable, str(tmp_path / "child.py"), str(tmp_path / "answer.json")]
        dialog = PlanDialog(parent, theme, model, PlanProcess(parent, command))
        sheets.append((parent, dialog))
        return dialog

    yield make
    for _, dialog in sheets:
        if isValid(dialog):  # closed sheets are deleted already
            dialog.close()


def test_plan_dialog_shows_whether_the_model_fits_and_suggests_options(make_dialog, qtbot):
    dialog = make_dialog()
    qtbot.waitUntil(lambda: "Some, 8.03 billion" in dialog.view.shown_text)
    assert "Fits in 24.0 GiB" in dialog.view.shown_text
    assert "--kv-cache-dtype fp8" in dialog.view.shown_text
    assert "Training" not in dialog.view.shown_text
    dialog.form.train.setChecked(True)
    qtbot.waitUntil(lambda: "at the worst moment (backward): it does not fit" in dialog.view.shown_text)


SERVING = (
    *("weights", "activations", "logits and sampling", "attention's partial results", "graphs"),
    *("context and others", "recurrent states", "KV cache"),
)
TRAINING = (
    *("weights", "gradients", "optimizer states", "activations", "temporary buffers", "gathered weights", "context"),
)


@pytest.mark.parametrize("theme", [DARK, LIGHT, SAFE_DARK, SAFE_LIGHT], ids=lambda theme: theme.name)
def test_parts_of_one_bar_have_distinct_colours(qtbot, theme):
    view = PlanView(theme)
    qtbot.addWidget(view)
    made = _make_answer()
    parts = [[PlanPart(name=name, num_bytes=GIB) for name in names] for names in (SERVING, TRAINING)]
    stage = msgspec.structs.replace(made.inference.stages[0], parts=tuple(parts[0]))
    serving = msgspec.structs.replace(made.inference, stages=(stage,))
    training = msgspec.structs.replace(made.training, parts=tuple(parts[1]))
    view.show_answer(msgspec.structs.replace(made, inference=serving, training=training))
    colors = [swatch.grab().toImage().pixelColor(5, 5).name() for swatch in view.findChildren(Swatch)]
    assert len(set(colors[: len(SERVING)])) == len(SERVING)
    assert len(set(colors[len(SERVING) :])) == len(TRAINING)


@pytest.mark.parametrize("fits", [True, False])
def test_plan_dialog_shows_the_same_percentages_as_the_plan_command(qtbot, fits):
    from kvscope_engine.planning.plan_report_text import plan_text

    view, made = PlanView(DARK), _make_answer(fits=fits)
    qtbot.addWidget(view)
    view.show_answer(made)
    assert "of 24.0 GiB" in view.shown_text
    assert "of 24.0 GiB" in plan_text(made)
    shares = [word for word in view.shown_text.split("\n") if word.endswith(" %")]
    assert shares == re.findall(r"\d+ %", plan_text(made))
    assert shares[:2] == ["62 %", "17 %"], "15 and 4 of 24 GiB"


def test_numbers_use_the_same_digit_grouping_everywhere(make_dialog, qtbot):
    dialog = make_dialog()
    qtbot.waitUntil(lambda: "Some, 8.03" in dialog.view.shown_text)
    assert dialog.form.tokens.text() == count(8192)
    assert count(2089) in dialog.view.shown_text
    dialog.form.tokens.setValue(1_234_567)
    assert dialog.form.tokens.text() == count(1_000_000 + 48_576)
    dialog.form.tokens.lineEdit().setText("16384")
    assert dialog.form.tokens.value() == 16384
    shown = [dialog.view.shown_text, dialog.form.train_length.text(), dialog.form.tokens.text()]
    assert not re.search(r"\d,\d{3}", " ".join(shown))


def test_plan_that_does_not_fit_shows_the_missing_memory(make_dialog, qtbot):
    dialog = make_dialog(fits=False, theme=LIGHT)
    qtbot.waitUntil(lambda: "Does not fit" in dialog.view.shown_text)
    assert "missing" in dialog.view.shown_text


def test_plan_dialog_answers_only_the_newest_of_several_requests(make_dialog, qtbot):
    dialog = make_dialog()
    for model in ("one", "two", "wrong", "three"):
        dialog.form.model.setText(model)
        dialog.request()
    qtbot.waitUntil(lambda: "three, 8.03" in dialog.view.shown_text)
    assert not dialog.process.is_busy


def test_error_is_shown_in_one_line_and_the_next_question_is_answered(make_dialog, qtbot):
    dialog = make_dialog("wrong")
    qtbot.waitUntil(lambda: dialog.view.shown_text == "model 'wrong' is not there")
    dialog.form.model.setText("dies")
    dialog.request()
    qtbot.waitUntil(lambda: "Planning stopped: it is dead." in dialog.view.shown_text)
    dialog.form.model.setText("Other")
    dialog.request()
    qtbot.waitUntil(lambda: "Other, 8.03" in dialog.view.shown_text)


def test_child_process_that_cannot_be_started_is_reported(qtbot):
    parent = QWidget()
    qtbot.addWidget(parent)
    dialog = PlanDialog(parent, DARK, "m", PlanProcess(parent, [str(Path("/nowhere/at/all"))]))
    qtbot.waitUntil(lambda: "Planning stopped: it cannot be started" in dialog.view.shown_text)
    dialog.close()


@pytest.mark.skipif(not RUNS_ENGINE, reason="compares with the engine's command")
def test_form_values_become_options_of_the_plan_command(make_dialog):
    from kvscope_engine.cli.main import build_parser

    dialog = make_dialog()
    dialog.form.length.setValue(4096)
    dialog.form.train.setChecked(True)
    dialog.form.checkpointing.setChecked(True)
    dialog.form.train_length.setValue(1024)
    args = build_parser().parse_args(["plan", *dialog.form.question])
    assert (args.model, args.gpu_memory, args.max_model_len, args.length) == ("Some", 24 * GIB, 4096, 1024)
    assert args.train
    assert args.gradient_checkpointing


def test_partial_answer_is_shown_while_the_rest_is_computed(make_dialog, qtbot):
    dialog = make_dialog("slow")
    qtbot.waitUntil(lambda: "slow, 8.03" in dialog.view.shown_text)
    assert "Fits in" in dialog.view.shown_text
    assert "--kv-cache-dtype fp8" not in dialog.view.shown_text
    assert dialog.process.is_busy
    dialog.process.child.send(["go on"])
    qtbot.waitUntil(lambda: "--kv-cache-dtype fp8" in dialog.view.shown_text)
    assert not dialog.process.is_busy


def test_child_process_is_reused_by_the_next_dialog_and_ends_when_idle(make_dialog, qtbot):
    dialog = make_dialog()
    process = dialog.process
    qtbot.waitUntil(lambda: "Some, 8.03" in dialog.view.shown_text)
    dialog.show()
    dialog.reject()
    assert process.child.is_running, "the next dialog uses the running process"
    other = PlanDialog(process.parent(), DARK, "Other", process)
    qtbot.waitUntil(lambda: "Other, 8.03" in other.view.shown_text)
    other.end()
    process._idle_timer.timeout.emit()  # the idle timeout has passed
    assert not process.child.is_running


@pytest.mark.parametrize("steps", [0, 5])
def test_form_fits_the_dialog_at_any_zoom(qtbot, themes, steps):
    themes.zoom(steps)
    parent = QWidget()
    qtbot.addWidget(parent)
    dialog = PlanDialog(parent, DARK, "m", PlanProcess(parent, [str(Path("/nowhere/at/all"))]))
    with qtbot.waitExposed(dialog):
        dialog.show()
    dialog.form.train.setChecked(True)
    qtbot.wait(50)
    assert dialog.form.width() <= dialog.form.parentWidget().width()


def test_answer_to_a_closed_dialog_is_not_shown_in_the_next(make_dialog, qtbot):
    dialog = make_dialog("slow")
    process = dialog.process
    qtbot.waitUntil(lambda: "slow, 8.03" in dialog.view.shown_text)
    dialog.end()
    other = PlanDialog(process.parent(), DARK, "Other", process)
    process.child.send(["go on"])
    qtbot.waitUntil(lambda: "Other, 8.03" in other.view.shown_text)
    other.end()
    process.close()
