"""Sphinx configuration of the documentation, built by `make docs`."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util import logging

from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.options import options_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))  # for command_reference and query_reference

project = "kvscope"
author = "the kvscope authors"
version = release = version_of("kvscope")
language = "en"
smartquotes = False  # options begin with two hyphens

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinxcontrib.mermaid",
    "command_reference",
    "query_reference",
]
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

# reference/python.md: the public names of these packages, from their docstrings.
PUBLIC_PACKAGES = ("kvscope_engine", "kvscope_telemetry", "kvscope_inside")
default_role = "literal"  # docstrings write code in single backticks
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
OPTIONS = {f"kvscope_engine.EngineConfig.{name}": each for name, each in options_of(EngineConfig).items()}

html_theme = "furo"
html_title = f"kvscope {version}"
html_copy_source = False
html_show_sphinx = False

_REPOSITORY = "https://github.com/kvscope/kvscope/blob/main"
_ROOT = Path(__file__).parents[1]


def link_out(app: Sphinx, docname: str, source: list[str]) -> None:
    def linked(match: re.Match[str]) -> str:
        target = (_ROOT / "docs" / docname).parent.joinpath(match[1]).resolve()
        return f"]({_REPOSITORY}/{target.relative_to(_ROOT)})" if target.is_file() else match[0]

    depth = docname.count("/") + 1
    source[0] = re.sub(r"\]\((" + r"\.\./" * depth + r"[^)#]+)\)", linked, source[0])


def load_public_names(app: Sphinx) -> None:
    """Load each name in the `__all__` of the public packages. Warn if one has no docstring, in which case `make docs`
    fails.

    The packages load their names on first access, and autodoc documents only names that are loaded.
    """
    for package in map(importlib.import_module, PUBLIC_PACKAGES):
        for name in package.__all__:
            value = getattr(package, name)
            setattr(package, name, value)
            if not value.__doc__ or value.__doc__.startswith(f"{name}("):  # the latter is made by dataclasses
                logging.getLogger(__name__).warning("%s.%s has no docstring", package.__name__, name)


def convert_docstring(app: Sphinx, what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Convert Google-style sections to reStructuredText, and describe the fields of `EngineConfig` by their help texts.

    The extension `sphinx.ext.napoleon` would also convert attributes, and mistake their text before a colon for a type.
    """
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True), app, what, name, member, options).lines()
    elif option := OPTIONS.get(name):
        lines[:0] = [option.help, ""]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", convert_docstring)
    app.connect("source-read", link_out)
    app.connect("builder-inited", load_public_names)
