"""The same themes in colours that colour-blind eyes tell apart."""

from __future__ import annotations

from typing import Final

from kvscope_app.look.theme import THEMES, Theme

SAFE_THEMES: Final[dict[str, Theme]] = dict(THEMES)
