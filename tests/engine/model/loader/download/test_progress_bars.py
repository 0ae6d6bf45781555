"""transformers' bars become progress events and its warnings are silenced inside the context, and both are restored
after it.
"""

from __future__ import annotations

import warnings

import pytest
from transformers.utils import logging

from kvscope_engine.model.loader.download.quiet import quiet_transformers
from kvscope_telemetry.messages.telemetry import Progress


def test_progress_bars_of_transformers_become_progress_events(
    progress_events: list[Progress], capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet_transformers(progress_events.append, "load", "x"):
        assert list(logging.tqdm(range(5), desc="iterated")) == [0, 1, 2, 3, 4]
        with logging.tqdm(total=3, desc="counted") as bar:
            bar.set_postfix_str("anything")
            bar.update(3)
        logging.tqdm(total=1).close()
    assert [(progress.done, progress.total) for progress in progress_events if progress.done == progress.total] == [
        (5, 5),
        (3, 3),
    ]
    assert capfd.readouterr() == ("", "")


def test_warnings_of_transformers_are_silenced_while_a_model_loads(
    progress_events: list[Progress], capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet_transformers(progress_events.append, "load", "x"):
        logging.get_logger("transformers.tests").warning("not seen")
        warnings.warn("not an error", FutureWarning, stacklevel=1)
    assert capfd.readouterr() == ("", "")


def test_logging_state_is_restored(progress_events: list[Progress]) -> None:
    verbosity = logging.get_verbosity()
    with pytest.raises(ZeroDivisionError), quiet_transformers(progress_events.append, "load", "x"):
        _ = 1 / 0
    assert logging.get_verbosity() == verbosity
    assert logging.set_tqdm_hook(None) is None
    with pytest.warns(FutureWarning):
        warnings.warn("seen", FutureWarning, stacklevel=1)
