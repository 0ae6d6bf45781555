"""Which version of kvscope this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """That of the installed package; a checkout that is merely on the path has none, and says so."""
    try:
        return version("kvscope")
    except PackageNotFoundError:
        return "not installed"
