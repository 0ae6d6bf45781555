"""Every model type of the installed transformers is served or refused as docs/reference/model-types.md says."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest
from tests.engine.model_types_page import PAGE, page, read_results

VERSION, RESULTS = read_results()
SAMPLE = ("llama", "gemma2", "bert", "aya_vision", "deepseek_v3", "recurrent_gemma", "falcon", "deepseek_v32", "blt")
SAMPLE += ("mllama", "chameleon", "inkling_text", "inkling2_text", "roberta")


def test_documentation_page_of_model_types_equals_the_test_results() -> None:
    assert PAGE.read_text("utf-8") == page(VERSION, RESULTS)


def test_every_model_type_of_transformers_has_a_test_result() -> None:
    import transformers
    from tests.engine.model_types import model_types

    if transformers.__version__ != VERSION:
        pytest.skip(f"transformers {VERSION} was tried, and this is {transformers.__version__}")
    assert list(RESULTS) == model_types()
    assert {found["result"] for found in RESULTS.values()} <= {"served", "refused", "not tried"}


@pytest.mark.storm(*({"model_type": name} for name in SAMPLE[1::2]))
@pytest.mark.parametrize("model_type", SAMPLE)
def test_sampled_model_types_are_served_or_refused_as_documented(model_type: str) -> None:
    check_model_type(model_type)


@pytest.mark.storm
@pytest.mark.parametrize("model_type", sorted(RESULTS.keys() - set(SAMPLE)))
def test_all_model_types_are_served_or_refused_as_documented(model_type: str) -> None:
    check_model_type(model_type)


def check_model_type(model_type: str) -> None:
    """Compare the outcome; numbers in reasons depend on the machine."""
    import transformers
    from tests.engine.trial_of_types import try_type

    if transformers.__version__ != VERSION:
        pytest.skip(f"transformers {VERSION} was tried, and this is {transformers.__version__}")
    found, told = asdict(try_type(model_type)), RESULTS[model_type]
    assert {key: _without_numbers(value) for key, value in found.items()} == {
        key: _without_numbers(value) for key, value in told.items()
    }


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", text)
