"""Identity of the code that computes a cached result. Must not import torch."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from kvscope_telemetry.program_version import program_version

_PACKAGES: Final = ("kvscope_engine", "kvscope_kernels", "kvscope_telemetry")
_SOURCES: Final = (".py", ".c", ".h")


def program_identity() -> list[str]:
    """Return kvscope's version, the versions of torch and transformers, and a hash of kvscope's source files.

    The sources are hashed because those of a checkout change without a new version. That takes 22 ms.
    """
    return [program_version(), *map(_version, ("torch", "transformers")), _sources_hash()]


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = find_spec(package)
        for top in (spec.submodule_search_locations if spec is not None else None) or ():
            for folder, subfolders, names in os.walk(top):
                subfolders.sort()
                for name in sorted(name for name in names if name.endswith(_SOURCES)):
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        content = file.read()
                    digest.update(f"{package}{path.removeprefix(top)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
