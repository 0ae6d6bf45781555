"""The engine's options as the desktop's command line takes them, checked, and passed on to its engine.

What only a device or a model can tell is the engine's.
"""

from __future__ import annotations

import argparse

from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.options import options_of


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add them in one group."""
    group = parser.add_argument_group("engine", "options for the engine that the desktop starts")
    for name, option in options_of(EngineConfig).items():
        option.add_passed_on(group, name)


def engine_arguments(args: argparse.Namespace) -> list[str]:
    """The engine's command line for what was given, without what was not."""
    return [word for name, option in options_of(EngineConfig).items() for word in option.words(getattr(args, name))]
