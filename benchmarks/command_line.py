"""Command line shared by all benchmarks of this folder: `--help`, and errors printed as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from kvscope_telemetry.errors import KvscopeError


def run_benchmark(
    doc: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse `arguments` (None for the process's), run the benchmark and return its exit code.

    `doc` is the description that `--help` prints.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except KvscopeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
