"""`kvscope export`."""

from __future__ import annotations

import argparse
from typing import Any


def add_export_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser("export", help="x")
    return parser
