"""Dark and light themes: the named colours that the desktop paints with.

Qt's colour scheme has no effect without a platform theme, so the colours of both themes are defined here, on top of the
Fusion style. pyqtgraph does not follow Qt's palette: views apply colours of a `Theme` in `View.apply_theme`.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from PySide6.QtGui import QColor

NUM_OWNER_COLORS: Final = 96
_GOLDEN_RATIO: Final = 0.618033988749895
_MIN_SIGN_CONTRAST: Final = 3.0
"""Minimum contrast ratio of a graphical sign to its background (WCAG 2.1, criterion 1.4.11)."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Named colours as `#rrggbb`."""

    name: str
    is_dark: bool
    window: str
    base: str
    """Background of edited and listed text, the page map and plots."""
    panel: str
    raised: str
    """Background of buttons, cards and hovered rows."""
    border: str
    text: str
    muted: str
    """Colour of labels, units and secondary text. Contrast ratio at least 4.5 on `panel`."""
    accent: str
    accent_text: str
    good: str
    warn: str
    bad: str
    grid: str
    series: tuple[str, ...]
    """Eight curve colours based on those of Okabe and Ito.

    Colour-blind users can distinguish the curve colours of the safe palette.
    """
    block_free: str
    block_active: str
    block_cached: str
    block_shared: str
    block_host: str
    block_disk: str
    block_unmapped: str
    flash_evicted: str
    flash_copied: str
    flash_saved: str
    flash_loaded: str
    """Colour of a page map cell shortly after its block was loaded from a lower tier. Large cells also get a glyph."""
    selection: str

    def color(self, name: str, alpha: int = 255) -> QColor:
        """Return the colour of the field `name`, with `alpha` from 0 (transparent) to 255."""
        color = QColor(str(getattr(self, name)))
        color.setAlpha(alpha)
        return color


DARK: Final = Theme(
    name="dark",
    is_dark=True,
    window="#0d0f13",
    base="#101318",
    panel="#15181e",
    raised="#1f242d",
    border="#2a303b",
    text="#e6e9ef",
    muted="#949dae",
    accent="#5b9dff",
    accent_text="#06101f",
    good="#3ecb92",
    warn="#f0b040",
    bad="#ff6b6b",
    grid="#232831",
    series=("#5badfe", "#f0a63a", "#34c8a0", "#dd84c8", "#f2e05c", "#f2764a", "#9281ec", "#abb5c3"),
    block_free="#232933",
    block_active="#3f8ff0",
    block_cached="#8f6a2e",
    block_shared="#f5a5dd",
    block_host="#00b696",
    block_disk="#d87b49",
    block_unmapped="#181c22",
    flash_evicted="#ff5566",
    flash_copied="#ffe14d",
    flash_saved="#c05eb8",
    flash_loaded="#6fe3ff",
    selection="#ffffff",
)

LIGHT: Final = Theme(
    name="light",
    is_dark=False,
    window="#eef0f4",
    base="#ffffff",
    panel="#f8f9fb",
    raised="#eceff4",
    border="#d7dce4",
    text="#1a1e26",
    muted="#5b6474",
    accent="#1a66dd",
    accent_text="#ffffff",
    good="#12805c",
    warn="#8b5301",
    bad="#d1353f",
    grid="#e6e9ee",
    series=("#0771c2", "#c87f00", "#0a8a6a", "#b5488a", "#8a7800", "#ab411c", "#5741dd", "#5b6474"),
    block_free="#e3e7ed",
    block_active="#2f80ea",
    block_cached="#ebb76a",
    block_shared="#9a2f9c",
    block_host="#068f79",
    block_disk="#8f4516",
    block_unmapped="#f3f5f8",
    flash_evicted="#d13c27",
    flash_copied="#cba400",
    flash_saved="#5f29d3",
    flash_loaded="#0d8cb6",
    selection="#10141b",
)

THEMES: Final = {theme.name: theme for theme in (DARK, LIGHT)}

# The same themes in colours that colour-blind users can distinguish. Colours that can be adjacent on the page map, in
# the request lanes and among curves differ by at least 10 in CIEDE2000, for normal vision, protanopes, deuteranopes and
# tritanopes (`tests/app/ui/theming/test_safe_palette.py`). Found by a search that starts at the standard palette and
# stays close to it. A colour has the same hue in both themes, so that it keeps its meaning.
SAFE_DARK: Final = replace(
    DARK,
    series=("#358dff", "#de9634", "#06cc99", "#ab6fa6", "#f3e25f", "#fffcfb", "#d2b5ff", "#abb3be"),
    block_active="#50a0fd",
    block_cached="#d19728",
    block_shared="#edb6de",
    block_host="#58917e",
    block_disk="#812005",
    flash_evicted="#d83b05",
    flash_copied="#f7f700",
    flash_saved="#481ace",
    flash_loaded="#c1fcdf",
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


@lru_cache(maxsize=4096)
def mix(first: str, second: str, share: float) -> str:
    """Return a mixture of two colours as `#rrggbb`, in which `second` has the fraction `share` (0 to 1)."""
    a, b = QColor(first), QColor(second)
    channels = ((a.red(), b.red()), (a.green(), b.green()), (a.blue(), b.blue()))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in channels)


def readable_on(color: str, theme: Theme) -> str:
    """Return the colour for drawing on `color`: the theme's base colour, or its text colour if the contrast is
    too low.
    """
    return theme.base if contrast_ratio(color, theme.base) >= _MIN_SIGN_CONTRAST else theme.text


def contrast_ratio(first: str, second: str) -> float:
    """Return the contrast ratio of two colours as defined by WCAG, from 1 to 21."""
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def owner_color(number: int, theme: Theme = DARK) -> QColor:
    """Return the colour of request `number`, the same in every view. Consecutive requests have distant hues."""
    return QColor(owner_colors(theme)[number % NUM_OWNER_COLORS])


@lru_cache(maxsize=8)
def owner_colors(theme: Theme) -> tuple[str, ...]:
    """Return `NUM_OWNER_COLORS` colours with hues a golden angle apart, in three lightnesses."""
    return tuple(_owner_color(index, theme.is_dark) for index in range(NUM_OWNER_COLORS))


def _owner_color(index: int, is_dark: bool) -> str:
    hue = (0.58 + index * _GOLDEN_RATIO) % 1.0
    lightness = (0.66, 0.56, 0.74)[index % 3] if is_dark else (0.50, 0.40, 0.58)[index % 3]
    # Yellow and green look lighter than blue at the same HLS lightness: darken them.
    lightness -= 0.10 * max(0.0, 1.0 - abs(hue - 0.25) / 0.2)
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.52)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _luminance(color: str) -> float:
    values = (int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))
    red, green, blue = (v / 12.92 if v <= 0.04045 else float(((v + 0.055) / 1.055) ** 2.4) for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
