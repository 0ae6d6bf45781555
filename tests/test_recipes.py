"""CONTRIBUTING's recipes ("To add a …") are true: what is made up here by changing the files of a recipe alone shows up
in every place where things of its kind stand.

The tree is not copied: a fresh Python takes the changed files from a folder, and all others from where they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PREAMBLE = '''
import importlib.util, sys

class Changed:
    """Finds the modules that a recipe changed."""

    files = {files!r}

    def find_spec(self, name, path=None, target=None):
        file = self.files.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, file)

sys.meta_path.insert(0, Changed())
'''


class Recipe:
    """Files of the tree as a recipe leaves them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, Path] = {}

    def insert(self, path: str, before: str, text: str) -> None:
        """Put `text` before the only line of the file that begins with `before`."""
        lines = self._text(path).splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if line.startswith(before)]
        assert len(places) == 1, f"{path} has {len(places)} lines that begin with {before!r}"
        self.write(path, "".join([*lines[: places[0]], textwrap.dedent(text), *lines[places[0] :]]))

    def replace(self, path: str, old: str, new: str) -> None:
        """Put `new` where `old` stands, once."""
        text = self._text(path)
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        self.write(path, text.replace(old, new))

    def write(self, path: str, text: str) -> None:
        """The whole file."""
        self.files[path] = self._folder / path
        self.files[path].parent.mkdir(parents=True, exist_ok=True)
        self.files[path].write_text(text, encoding="utf-8")

    def check(self, script: str) -> None:
        """Run it in a Python that has these files."""
        modules = {_module(path): str(file) for path, file in self.files.items()}
        code = _PREAMBLE.format(files=modules) + textwrap.dedent(script)
        home = {f"XDG_{name}_HOME": str(self._folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
        env = {**os.environ, **home, "QT_QPA_PLATFORM": "offscreen", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], cwd=self._folder, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout + done.stderr

    def _text(self, path: str) -> str:
        return self.files.get(path, ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path)


def listed(what: str) -> set[str]:
    """The files that CONTRIBUTING lists for adding a `what`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    assert len(rows) == 1, f"CONTRIBUTING has no recipe for a {what}"
    return set(re.findall(r"`((?:app|engine|kernels)/[\w/]+\.py)`", rows[0]))


def _module(path: str) -> str:
    return path.split("/", 1)[1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_a_colour_mode_of_the_page_map(recipe: Recipe) -> None:
    modes = "app/kvscope_app/views/page_map/color_modes.py"
    recipe.insert(
        modes,
        "COLOR_MODES: Final",
        """
        PARITY: Final = ColorMode(
            "parity",
            "Whether its number is odd",
            lambda ledger, rows, block_size, step: (np.arange(ledger.num_blocks)[rows] % 2 + 3).astype(np.uint8),
            lambda theme: {3: theme.good, 4: theme.bad},
            lambda theme, shown: [Swatch(theme.good, "even"), Swatch(theme.bad, "odd")],
            is_told=lambda told: told.physical_rows,
            needs="block numbers",
        )

        """,
    )
    recipe.replace(modes, "AGE, ATTENTION)", "AGE, ATTENTION, PARITY)")
    recipe.check(
        """
        from PySide6.QtCore import QSettings
        from PySide6.QtWidgets import QApplication
        from kvscope_app.look.theme import DARK
        from kvscope_app.look.theming.theme_keeper import ThemeKeeper
        from kvscope_app.session.session import Session
        from kvscope_app.settings.settings_keeper import read_settings
        from kvscope_app.window.arranging.arrangement import layout_of, show_layout
        from kvscope_app.window.main_window import MainWindow
        from kvscope_telemetry.messages.capabilities import Capabilities
        from tests.app.conftest import FakeEngine, poll_all

        app = QApplication([])
        settings = QSettings("settings.ini", QSettings.Format.IniFormat)
        themes = ThemeKeeper(app, settings, "dark")

        def window_of(**told):
            engine = FakeEngine(**told)
            session = Session(engine.source)
            engine.hold(range(64))
            poll_all(session)
            window = MainWindow(session, themes, settings)
            window.resize(1200, 800)
            window.show()
            window.page_map.draw_all()
            return window

        window = window_of()
        action = window.actions_by_name["color_parity"]
        assert action.text() == "Colour by parity" and action.isEnabled() and not action.shortcut().isEmpty()
        action.trigger()
        window.page_map.draw_all()
        assert window.page_map.mode.name == "parity" and action.isChecked()
        pixels = {hex(pixel & 0xFFFFFF) for pixel in window.page_map.scene.pixels.flatten().tolist()}
        assert {hex(int(color[1:], 16)) for color in (DARK.good, DARK.bad)} <= pixels
        names = [widget.accessibleName() for widget in window.page_map.children() if hasattr(widget, "accessibleName")]
        assert "Colours show parity: even, odd, free" in names, names
        assert read_settings(settings).color_mode == "parity"
        layout = layout_of(window)
        assert layout.choices.color_mode == "parity"
        window.actions_by_name["color_state"].trigger()
        show_layout(window, layout)
        assert window.page_map.mode.name == "parity"
        unable = window_of(capabilities=Capabilities(physical_rows=False))
        assert unable.page_map.mode.name == "state"
        assert not unable.actions_by_name["color_parity"].isEnabled()
        assert unable.actions_by_name["color_parity"].toolTip().endswith("does not tell block numbers")
        for each in (window, unable):
            each.close()
            each.session.close()
        """
    )
    assert set(recipe.files) == listed("colour mode of the page map")
