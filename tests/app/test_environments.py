"""Tests of windows and pictures under several locales and without fonts."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from tests.warm_python import WarmPython

from kvscope_app.views.docks import DOCKS

PROGRAM = """
import os, sys
name, locales, picture = sys.argv[1:]
os.environ.update(LANG=name, LOCPATH=locales, QT_QPA_PLATFORM="offscreen")
for unset in ("LC_ALL", "LC_CTYPE", "LC_NUMERIC"):
    os.environ.pop(unset, None)
from PySide6.QtCore import QEventLoop, QLocale, QSettings, QTimer
from kvscope_app.command_line import Options
from kvscope_app.application import make_application
from kvscope_app.desktop import Desktop
from kvscope_app.main import main
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
app = make_application()
desktop = Desktop(app, Options(theme="dark"), QSettings())
window = desktop.open_recording(Recording.open(sample_recording()), 10.0)
loop = QEventLoop()
window.views_loaded.connect(loop.quit)
loop.exec()
print(QLocale().name(), len(window.views), window.session.mirror.num_blocks > 0)
window.close()
desktop.close()
sys.exit(main(["export", "sample", "--to", "png", "--out", picture]))
"""


@pytest.fixture(scope="module")
def warm_desktop():
    views = [f"kvscope_app.views.{spec.folder}.{spec.folder}_view" for spec in DOCKS]
    python = WarmPython("kvscope_app.desktop", "kvscope_app.media_export.offscreen_view", *views)
    yield python
    python.close()


@pytest.fixture(scope="module")
def locales(tmp_path_factory):
    """Folder with compiled locales."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("localedef, which compiles locales, is not installed")
    for name in ("tr_TR", "az_AZ", "de_DE", "fa_IR"):
        command = ["localedef", "-i", name, "-f", "UTF-8", str(folder / f"{name}.UTF-8")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the locale {name} cannot be compiled here: {done.stderr.strip()[:200]}")
    return folder


@pytest.mark.storm({"name": "az_AZ"}, {"name": "de_DE"}, {"name": "C"})  # like Turkish, or fewer differences
@pytest.mark.parametrize("name", ["tr_TR", "az_AZ", "de_DE", "fa_IR", "C"])
def test_window_and_picture_open_in_each_locale(name, locales, warm_desktop, tmp_path):
    picture = tmp_path / "map.png"
    done = warm_desktop.run(["-c", PROGRAM, f"{name}.UTF-8", str(locales), str(picture)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Error" not in done.stderr
    assert "no fonts" not in done.stderr
    assert done.stdout.splitlines()[0] == f"{name} {len(DOCKS) + 1} True", "Qt must use the user's locale"
    assert picture.stat().st_size > 10_000


def test_missing_fonts_are_reported_in_one_line(warm_desktop, tmp_path):
    config = tmp_path / "fonts.conf"
    config.write_text(f"<fontconfig><cachedir>{tmp_path}</cachedir></fontconfig>")
    program = "import os, sys; os.environ.update(FONTCONFIG_FILE=sys.argv[1], QT_QPA_PLATFORM='offscreen')\n"
    program += "from kvscope_app.application import make_application; make_application()"
    done = warm_desktop.run(["-c", program, str(config)])
    assert done.returncode == 0
    assert "kvscope: no fonts are installed" in done.stderr
