"""The OpenAPI document describes the API, and no request drawn from it or beyond it makes the server fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, seed, settings
from tests.engine.http.served import Served

from kvscope_engine.http.openapi import document

LABELS = [f"{method.upper()} {path}" for path, methods in document()["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    """Operations of the document by label. A fixture, because importing schemathesis takes seconds."""
    import schemathesis

    found = [result.ok() for result in schemathesis.openapi.from_dict(document()).get_all_operations()]
    return {operation.label: operation for operation in found}


def test_openapi_document_is_served(served: Served) -> None:
    status, served_document = served.ask("/openapi.json")
    assert status == 200
    assert served_document == document()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/tokenize"} <= served_document[
        "paths"
    ].keys()


def test_every_operation_of_the_openapi_document_is_tested(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(LABELS)


@pytest.mark.parametrize("label", LABELS)
def test_drawn_requests_never_cause_a_server_error(
    operations: dict[str, Any], label: str, served: Served, storm: Callable[[int, int], int]
) -> None:
    host, port = served.address
    operation = operations[label]

    @seed(1)
    @settings(max_examples=storm(5, 60), database=None)
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        answer = case.call(base_url=f"http://{host}:{port}", timeout=120)
        assert answer.status_code < 500, answer.text
        assert str(answer.status_code) in case.operation.definition.raw["responses"]
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    check()
