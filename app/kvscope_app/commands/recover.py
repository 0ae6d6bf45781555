"""`kvscope recover`."""

from __future__ import annotations

import argparse
from typing import Any


def add_recover_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser("recover", help="x")
    return parser
