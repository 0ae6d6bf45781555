"""Assertion rewriting is shared between processes: each rewrites a share of the test files for all.

pytest rewrites a file when it is first imported and keeps the result. Processes that collect the same files in the
same order would each do all of that work at the same time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def rewrite_share(config: pytest.Config) -> None:
    """Rewrite the share of this process, if it is one of several and Python keeps compiled files. A version of pytest
    that keeps them in another way does without: then every process rewrites what it imports.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    if sys.dont_write_bytecode or not (worker.startswith("gw") and worker[2:].isdecimal() and count.isdecimal()):
        return
    try:
        for path in sorted(_collected(config))[int(worker[2:]) :: int(count)]:
            _rewrite(path, config)
    except (ImportError, AttributeError, TypeError, KeyError):
        return


def _collected(config: pytest.Config) -> set[Path]:
    """Return the test files that this run was asked for."""
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args]
    return {path for each in asked for path in ([each] if each.is_file() else each.rglob("test_*.py"))}


def _rewrite(path: Path, config: pytest.Config) -> None:
    """Rewrite a file like the first import of `path`."""
    from _pytest.assertion import rewrite

    folder = rewrite.get_cache_dir(path)
    kept = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(folder):
        status, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, kept)
