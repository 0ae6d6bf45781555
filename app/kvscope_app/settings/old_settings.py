"""What the INI file of earlier versions says, read once: when there is no settings file yet."""

from __future__ import annotations

from PySide6.QtCore import QSettings

from kvscope_app.setting_names import KEPT_MEGABYTES, KEPT_MINUTES, THEME
from kvscope_app.settings.settings import MEGABYTES, MINUTES


def old_choices(settings: QSettings) -> dict[str, object]:
    """Fields of `Settings` by name, of what is there and makes sense."""
    found: dict[str, object] = {}
    theme = str(settings.value(THEME, ""))
    if theme in ("auto", "dark", "light"):
        found["theme"] = theme
    for field, name, accepted in (
        ("timeline_minutes", KEPT_MINUTES, MINUTES),
        ("timeline_megabytes", KEPT_MEGABYTES, MEGABYTES),
    ):
        number = _whole(settings.value(name))
        if number is not None:
            found[field] = max(accepted[0], min(number, accepted[2]))
    return found


def _whole(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None
