"""The API in this process before a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.http.served import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for all tests of a module, that steps quickly."""
    one = Served(step_s=0.002)
    yield one
    one.close()


@pytest.fixture
def serving() -> Iterator[Callable[..., Served]]:
    """Makes them for one test; keyword arguments are `limits`, `api_key` and those of the fake engine."""
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()
