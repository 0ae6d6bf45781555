"""Creates the QApplication, for the desktop and for commands that render without a window."""

from __future__ import annotations

import locale
import sys
from contextlib import suppress
from typing import Final

from PySide6.QtCore import QSettings
from PySide6.QtWidgets import QApplication

from kvscope_app.command_line import PROGRAM
from kvscope_app.ui.fonts import apply_fonts, has_fonts
from kvscope_app.ui.icons import app_icon

_SWITCH_S: Final = 0.001
"""Seconds that another Python thread may run while the GUI thread waits for the interpreter lock.

Python's default is 5 ms: the GUI would respond that much later whenever the reader thread is running.
"""


def make_application() -> QApplication:
    """Create the QApplication with its name, font and icon.

    Settings are stored in an INI file in the user's configuration folder. Python threads switch more often from then
    on (`_SWITCH_S`).
    """
    sys.setswitchinterval(_SWITCH_S)
    QSettings.setDefaultFormat(QSettings.Format.IniFormat)
    app = QApplication([PROGRAM])
    _use_neutral_case_rules()
    app.setApplicationName(PROGRAM)
    app.setOrganizationName(PROGRAM)
    app.setDesktopFileName(PROGRAM)
    app.setWindowIcon(app_icon())
    apply_fonts(app)
    if not has_fonts(app):
        print(
            f"{PROGRAM}: no fonts are installed, text appears as boxes: apt-get install fonts-dejavu", file=sys.stderr
        )
    return app


def _use_neutral_case_rules() -> None:
    """Set LC_CTYPE to C.UTF-8, because PySide fails in a Turkish or Azerbaijani locale.

    QApplication sets all categories from the environment. PySide derives the setter of a keyword property from the
    property's name with C's `toupper`, which does not map `i` to `I` in these languages: `QTimer(interval=5)` raises
    AttributeError. Numbers and dates stay in the user's language, because Qt reads that from the environment.
    """
    for name in ("C.UTF-8", "C"):  # some systems have no C.UTF-8
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            return
