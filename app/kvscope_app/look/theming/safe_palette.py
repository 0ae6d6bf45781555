"""The same themes in colours that colour-blind eyes tell apart.

What can stand side by side on the page map (states, flashes over any of them), in the lanes of requests, and among
curves is at least 10 apart in CIEDE2000, as usual eyes, protanopes, deuteranopes and tritanopes see it;
`tests/app/look/test_safe_palette.py` measures it. Found by search from the usual palette, as near to it as that allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvscope_app.look.theme import DARK, LIGHT, Theme

SAFE_DARK: Final = replace(
    DARK,
    series=("#358dff", "#de9634", "#06cc99", "#ab6fa6", "#f3e25f", "#fffcfb", "#d2b5ff", "#abb3be"),
    block_active="#5aa0fc",
    block_cached="#96197a",
    block_shared="#fab8ed",
    block_host="#58917e",
    block_disk="#f19159",
    flash_evicted="#d83b05",
    flash_copied="#fff514",
    flash_saved="#6954e2",
    flash_loaded="#d0f0d5",
    good="#3ecb9d",
    warn="#f8b205",
    bad="#fe6b6a",
)
SAFE_LIGHT: Final = replace(
    LIGHT,
    series=("#31648c", "#6a584a", "#359473", "#d272a5", "#968700", "#a5350a", "#2016b4", "#7964f1"),
    block_active="#307feb",
    block_cached="#dc9b13",
    block_shared="#771775",
    block_host="#47845f",
    block_disk="#260007",
    flash_evicted="#de0d11",
    flash_copied="#f1de9a",
    flash_saved="#3b04ff",
    flash_loaded="#0accff",
    good="#17805d",
    warn="#804c01",
    bad="#dd0741",
)
SAFE_THEMES: Final[dict[str, Theme]] = {theme.name: theme for theme in (SAFE_DARK, SAFE_LIGHT)}
