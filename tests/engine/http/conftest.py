"""The HTTP API in this process with a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.http.served import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """API with a fast fake engine, shared by all tests of a module."""
    one = Served(step_s=0.002)
    yield one
    one.close()


@pytest.fixture
def serving() -> Iterator[Callable[..., Served]]:
    """Function that makes an API for one test from `limits`, `api_key` and the fake engine's options."""
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()
