"""Fixtures: endpoints, scripted engines and metrics pages, each closed with its test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from tests.telemetry.metrics.scripted import ScriptedEngine

from kvscope_telemetry.metrics.metrics_page import MetricsPage


@pytest.fixture
def endpoint() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="kv-")
    yield f"ipc://{folder}"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_engine(endpoint: str) -> Iterator[Callable[..., ScriptedEngine]]:
    """Function that starts an engine at the endpoint: `start_engine(epoch)`."""
    with ExitStack() as stack:
        yield lambda epoch=1: stack.enter_context(closing(ScriptedEngine(endpoint, epoch)))


@pytest.fixture
def page(endpoint: str) -> Iterator[MetricsPage]:
    """The metrics page of the engine at the endpoint."""
    with closing(MetricsPage(endpoint)) as page:
        yield page
