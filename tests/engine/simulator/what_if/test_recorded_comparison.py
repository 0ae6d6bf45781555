"""Questions about a recording: the recorded settings are simulated again, and compared with what was measured."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from kvscope_engine.cli.arguments.recorded_setups import answer_question
from kvscope_engine.cli.main import main
from kvscope_engine.simulator.what_if.line_protocol import answer_lines
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if import Complaint
from kvscope_telemetry.messages.what_if_question import (
    MAX_ERROR,
    WhatIfComparison,
    WhatIfFigures,
    WhatIfProgress,
    WhatIfQuestion,
    relative_error,
)
from kvscope_telemetry.recordings.sample import named_recording

SCARCE = ("--requests", "12", "--rate", "4", "--num-gpu-blocks-override", "80", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def recorded_simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recording of a simulation in which blocks are scarce."""
    path = tmp_path_factory.mktemp("recorded") / "run.mcap"
    assert main(["simulate", "sharegpt", *SCARCE, "--record", str(path)]) == 0
    return path


def test_simulation_of_the_sample_as_it_was_recorded_is_close_to_what_was_measured() -> None:
    shares: list[float] = []
    comparison = answer_question(WhatIfQuestion(str(named_recording("sample")), ["--blocks-times", "2"]), shares.append)
    errors = comparison.errors
    assert all(error is not None and error < MAX_ERROR for error in errors.values()), errors
    assert comparison.is_reliable
    assert comparison.num_runs > 1
    assert comparison.changed.num_preemptions is not None
    assert comparison.unchanged.num_preemptions is not None
    assert comparison.changed.num_preemptions < comparison.unchanged.num_preemptions
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_recorded_simulation_is_simulated_again_with_small_errors(recorded_simulation: Path) -> None:
    comparison = answer_question(WhatIfQuestion(str(recorded_simulation), ["--blocks-times", "9"]), lambda _: None)
    assert comparison.is_reliable, comparison.errors
    assert comparison.measured.num_preemptions
    assert comparison.changed.num_preemptions == 0
    assert comparison.num_requests == 12


def test_settings_in_which_requests_do_not_fit_report_the_number_refused(recorded_simulation: Path) -> None:
    options = ["--num-gpu-blocks-override", "20"]
    comparison = answer_question(WhatIfQuestion(str(recorded_simulation), options), lambda _: None)
    assert comparison.changed.num_refused > comparison.unchanged.num_refused == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--blocks-times", "0"], "blocks_times=0 is not accepted"),
        (["--max-num-seqs", "none"], "'none' is not accepted"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_options_that_are_not_accepted_are_refused_with_their_name(
    recorded_simulation: Path, options: list[str], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        answer_question(WhatIfQuestion(str(recorded_simulation), options), lambda _: None)


def test_question_line_is_answered_with_progress_and_a_comparison(tmp_path: Path) -> None:
    figures = WhatIfFigures(ttft_p50_s=1.0, num_preemptions=2)
    comparison = WhatIfComparison(measured=figures, unchanged=figures, changed=figures, num_requests=3)

    def answer(question: WhatIfQuestion, report: object) -> WhatIfComparison:
        assert callable(report)
        report(0.5)
        if not question.options:
            raise BadInput("no options")
        return comparison

    questions = [
        {"question": {"recording": "run.mcap", "options": options}} for options in (["--blocks-times", "2"], [])
    ]
    output = io.BytesIO()
    answer_lines(io.BytesIO(b"".join(msgspec.json.encode(each) + b"\n" for each in questions)), output, answer)
    lines = output.getvalue().splitlines()
    assert msgspec.json.decode(lines[0], type=WhatIfProgress).share_done == 0.5
    assert msgspec.json.decode(lines[1], type=WhatIfComparison) == comparison
    assert msgspec.json.decode(lines[3], type=Complaint).error == "line 2: no options"


def test_errors_are_relative_and_unlimited_if_none_was_measured() -> None:
    assert relative_error(4.0, 5.0) == 0.25
    assert relative_error(0.0, 0.0) == 0
    assert relative_error(0.0, 1.0) == float("inf")
    assert relative_error(None, 1.0) is None
