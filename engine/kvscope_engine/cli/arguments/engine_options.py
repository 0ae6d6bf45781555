"""Engine options, shared by all commands that start an engine: the fields of `EngineConfig`, in groups."""

from __future__ import annotations

import argparse
from typing import Any

from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.options import options_of


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    options = options_of(EngineConfig)
    titles = dict.fromkeys(option.group for option in options.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, option in options.items():
        option.add_to(groups[option.group], name)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**engine_option_values(args))


def engine_option_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options by name of the field of `EngineConfig`, without those that are None."""
    values = {name: getattr(args, name) for name in options_of(EngineConfig)}
    set_values = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in set_values.items()}
