"""Version of kvscope."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """Return the version of the installed package, or "not installed" for a checkout that is only on the import
    path.
    """
    try:
        return version("kvscope")
    except PackageNotFoundError:
        return "not installed"
