"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))  # for command_reference

project = "kvscope"
author = "the kvscope authors"
version = release = version_of("kvscope")
language = "en"
smartquotes = False  # options begin with two hyphens

extensions = ["myst_parser", "sphinxcontrib.mermaid", "command_reference"]
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"kvscope {version}"
html_copy_source = False
html_show_sphinx = False

_REPOSITORY = "https://github.com/kvscope/kvscope/blob/main"
_ROOT = Path(__file__).parents[1]


def link_out(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a file outside these pages, which is right in the repository, leads to the repository from the site."""

    def linked(found: re.Match[str]) -> str:
        target = (_ROOT / "docs" / docname).parent.joinpath(found[1]).resolve()
        return f"]({_REPOSITORY}/{target.relative_to(_ROOT)})" if target.is_file() else found[0]

    depth = docname.count("/") + 1
    source[0] = re.sub(r"\]\((" + r"\.\./" * depth + r"[^)#]+)\)", linked, source[0])


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", link_out)
