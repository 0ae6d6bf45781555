"""Command `kvscope-engine dashboard`: prints the Grafana dashboard for `/metrics`. Imports no server code."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from typing import Any

ABOUT = (
    "Print the Grafana dashboard for /metrics (see `kvscope-engine http --help`) as JSON. In Grafana: Dashboards, New,"
    " Import, and choose the Prometheus that scrapes the engine."
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "dashboard", help="print the Grafana dashboard for /metrics", description=ABOUT
    )
    parser.add_argument("--path", action="store_true", help="print the path of the dashboard's file instead")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    dashboard = files("kvscope_resources").joinpath("grafana", "kvscope.json")
    if args.path:
        print(dashboard)
    else:
        sys.stdout.write(dashboard.read_text("utf-8"))
    return 0
