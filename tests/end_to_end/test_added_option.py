"""A new engine option needs only one field of its configuration: command lines, help and checks follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvscope_app import command_line
from kvscope_engine.cli.arguments import engine_options as engines
from kvscope_engine.command_parser import CommandParser
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.options import Whole, option


@dataclass(frozen=True, kw_only=True)
class ConfigWithOneMoreField(EngineConfig):
    """The configuration as if the field had been added to `EngineConfig`."""

    made_up_rows: int = option(
        3, Whole(1, 9), group="scheduler", metavar="ROWS", help="rows that nobody needs", brief="rows (default: 3)"
    )


@pytest.fixture(autouse=True)
def _add_field(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engines, command_line):
        monkeypatch.setattr(module, "EngineConfig", ConfigWithOneMoreField)


def test_engine_accepts_the_new_option() -> None:
    parser = CommandParser(prog="test")
    engines.add_engine_options(parser)
    assert engines.engine_config(parser.parse_args([])) == ConfigWithOneMoreField()
    assert engines.engine_config(parser.parse_args(["--made-up-rows", "5"])) == ConfigWithOneMoreField(made_up_rows=5)
    assert "--made-up-rows ROWS" in parser.format_help()
    assert "rows that nobody needs (default: 3)" in parser.format_help()
    with pytest.raises(BadInput, match="--made-up-rows: '0' is not accepted: must be a whole number from 1 to 9"):
        parser.parse_args(["--made-up-rows", "0"])


def test_app_passes_the_new_option_on() -> None:
    options = command_line.parse(["--made-up-rows=5"])
    assert isinstance(options, command_line.Options)
    assert options.engine == ("--made-up-rows=5",)
    assert "rows (default: 3)" in command_line.build_parser().format_help()
    with pytest.raises(BadInput, match="--made-up-rows: '10' is not accepted: must be a whole number from 1 to 9"):
        command_line.parse(["--made-up-rows", "10"])


def test_invalid_value_of_a_new_engine_option_is_refused_in_python() -> None:
    with pytest.raises(BadInput, match="made_up_rows='5' is not accepted: must be a whole number from 1 to 9"):
        ConfigWithOneMoreField(made_up_rows="5")  # type: ignore[arg-type]
