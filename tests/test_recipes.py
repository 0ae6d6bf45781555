"""The recipes of CONTRIBUTING ("To add a …") are complete: a made-up addition that changes only the files of a recipe
appears everywhere.

The tree is not copied: a new Python process takes the changed files from a folder, and all others from their place.
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

def folder_of(file):
    folder, _, name = file.rpartition("/")
    return {"submodule_search_locations": [folder]} if name == "__init__.py" else {}

class Changed:
    """Finds the modules that a recipe changed."""

    files = FILES

    def find_spec(self, name, path=None, target=None):
        file = self.files.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, file, **folder_of(file))

sys.meta_path.insert(0, Changed())
'''


class Recipe:
    """The files of the tree after following a recipe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, Path] = {}

    def insert(self, path: str, before: str, text: str) -> None:
        """Insert `text` before the only line of the file that begins with `before`."""
        lines = self._text(path).splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if line.startswith(before)]
        assert len(places) == 1, f"{path} has {len(places)} lines that begin with {before!r}"
        self.write(path, "".join([*lines[: places[0]], textwrap.dedent(text), *lines[places[0] :]]))

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which occurs once, with `new`."""
        text = self._text(path)
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        self.write(path, text.replace(old, new))

    def write(self, path: str, text: str) -> None:
        """Write the whole file."""
        self.files[path] = self._folder / path
        self.files[path].parent.mkdir(parents=True, exist_ok=True)
        self.files[path].write_text(text, encoding="utf-8")

    def check(self, script: str) -> None:
        """Run a script in a Python process with these files."""
        modules = {_module(path): str(file) for path, file in self.files.items()}
        check = self._folder / "check.py"
        check.write_text(_PREAMBLE.replace("FILES", repr(modules)) + textwrap.dedent(script), encoding="utf-8")
        home = {f"XDG_{name}_HOME": str(self._folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, **home, "QT_QPA_PLATFORM": "offscreen", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, str(check)], cwd=self._folder, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout + done.stderr

    def _text(self, path: str) -> str:
        return self.files.get(path, ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path)


def listed_files(what: str) -> set[str]:
    """Return the files that CONTRIBUTING lists for adding a `what`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    assert len(rows) == 1, f"CONTRIBUTING has no recipe for a {what}"
    return set(re.findall(r"`((?:app|engine|kernels)/[\w/]+\.py)`", rows[0]))


def _module(path: str) -> str:
    return path.split("/", 1)[1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_recipe_for_a_color_mode_is_complete(recipe: Recipe) -> None:
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
            lambda theme, shown: [LegendSwatch(theme.good, "even"), LegendSwatch(theme.bad, "odd")],
            is_available=lambda told: told.physical_rows,
            needs="block numbers",
        )

        """,
    )
    recipe.replace(modes, "GROUP, EVICTION)", "GROUP, EVICTION, PARITY)")
    recipe.check(
        """
        from PySide6.QtCore import QSettings
        from PySide6.QtWidgets import QApplication
        from kvscope_app.ui.theme import DARK
        from kvscope_app.ui.theming.theme_manager import ThemeManager
        from kvscope_app.session.session import Session
        from kvscope_app.settings.settings_store import read_settings
        from kvscope_app.window.dock_layouts.arrangement import layout_of, show_layout
        from kvscope_app.window.main_window import MainWindow
        from kvscope_telemetry.messages.capabilities import Capabilities
        from tests.app.conftest import FakeEngine, poll_all

        app = QApplication([])
        settings = QSettings("settings.ini", QSettings.Format.IniFormat)
        themes = ThemeManager(app, settings, "dark")

        def window_of(**told):
            engine = FakeEngine(**told)
            session = Session(engine.source)
            engine.write_blocks(range(64))
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
        assert unable.actions_by_name["color_parity"].toolTip().endswith("does not report block numbers")
        for each in (window, unable):
            each.close()
            each.session.close()
        """
    )
    assert set(recipe.files) == listed_files("colour mode of the page map")


def test_recipe_for_an_event_kind_is_complete(recipe: Recipe) -> None:
    kinds = "engine/kvscope_telemetry/messages/event_kinds.py"
    recipe.insert(
        kinds,
        "EVENT_KINDS: Final",
        """
        def _migrated(event: Event, data: EventData) -> list[str]:
            return [f"{counted(event.num_blocks, 'block')} moved to {data.why}"]


        """,
    )
    recipe.replace(
        kinds,
        '    EventKind("aborted"',
        '''    EventKind(
        "migrated",
        "flash_copied",
        "migration",
        {"migrated": _migrated},
        EventLane("flash_copied"),
        is_stepped=True,
        is_first_named=True,
    ),
    EventKind("aborted"''',
    )
    causes = "engine/kvscope_engine/policy/scheduling/request_events.py"
    recipe.write(
        causes,
        (ROOT / causes).read_text(encoding="utf-8")
        + textwrap.dedent(
            '''

            def migrated(number: int, num_blocks: int, where: str, now_ns: int) -> Event:
                """The blocks of a request went to another machine."""
                data = EventData(kind="migrated", why=where)
                event = Event(kind="migrated", time_ns=now_ns, number=number, num_blocks=num_blocks, data=data)
                return with_cause(event)
            '''
        ),
    )
    recipe.check(
        """
        from io import BytesIO
        from pathlib import Path
        from msgspec.structs import replace
        from PySide6.QtCore import QSettings
        from PySide6.QtWidgets import QApplication
        from kvscope_app.ui.theme import DARK
        from kvscope_app.ui.theming.theme_manager import ThemeManager
        from kvscope_app.session.session import Session
        from kvscope_app.views.timeline.lane_layout import LANES, LaneLayout
        from kvscope_app.views.timeline.lane_picture import ShownLanes, lanes_without_data, draw
        from kvscope_app.views.timeline.lane_descriptions import hit_lane
        from kvscope_app.views.timeline.request_lanes import RequestLanes
        from kvscope_app.session.time_span import TimeSpan
        from kvscope_app.window.main_window import MainWindow
        from kvscope_engine.policy.scheduling.request_events import migrated
        from kvscope_telemetry.exports.comparison.alignment import named_moments
        from kvscope_telemetry.exports.export import ExportTarget, export
        from kvscope_telemetry.playback.playback_source import PlaybackSource
        from kvscope_telemetry.recordings.overview import read_overview
        from kvscope_telemetry.recordings.reader import Recording
        from kvscope_telemetry.recordings.writer import RecordingWriter
        from tests.telemetry.exports.conftest import story

        messages = story()
        event = migrated(2, 5, "another machine", messages[5].time_ns)
        messages[5] = replace(messages[5], events=(event,))
        with RecordingWriter(Path("told.mcap")) as writer:
            for message in messages:
                writer.write(message, wait=True)
        recording = Recording.open(writer.path)
        why = "5 blocks moved to another machine"
        for name in ("events.csv", "report.html", "trace.pftrace"):
            export(recording, ExportTarget.from_path(Path(name)))
            data = Path(name).read_bytes()
            assert b"migrated" in data and why.encode() in data, name

        overview = read_overview(recording)
        assert "first migration" in {moment.name for moment in named_moments(overview)}
        assert "migrated" not in lanes_without_data(overview)
        place = next(place for place in range(len(overview.events)) if overview.events[place].event.kind == "migrated")
        time_ns = overview.events[place].time_ns
        shown = ShownLanes(overview, RequestLanes(), TimeSpan(time_ns - 10**9, time_ns + 10**9), time_ns + 10**9)
        layout = LaneLayout(904, 600)
        lane, top, height = next(box for box in layout.boxes() if box[0].name == "migrated")
        assert lane.title == "Migrations"
        pixels = draw(shown, layout, DARK, 1.0)[top : top + height, 390:410]
        assert int(DARK.flash_copied[1:], 16) in {pixel & 0xFFFFFF for pixel in pixels.flatten().tolist()}
        assert why in hit_lane("migrated", shown, time_ns, 10**6).text

        app = QApplication([])
        settings = QSettings("settings.ini", QSettings.Format.IniFormat)
        source = PlaybackSource(recording, is_playing=False)
        session = Session(source)
        while not session.is_overview_complete:
            session.poll()
        window = MainWindow(session, ThemeManager(app, settings, "dark"), settings)
        window.resize(1500, 900)
        window.show()
        while "events" not in window.views:
            app.processEvents()
        assert window.actions_by_name["events_migrated"].text() == "Step by migrations"
        events = window.views["events"]
        events.kind_actions["migrated"].trigger()
        events.refresh()
        model = events.model
        assert [model.index(0, column).data() for column in (1, 3)] == ["migrated", why]
        assert model.kind_color(model.entry_at(0)).name() == DARK.flash_copied
        window.close()
        session.close()
        """
    )
    assert set(recipe.files) == listed_files("event kind")


def test_recipe_for_a_view_is_complete(recipe: Recipe) -> None:
    recipe.write("app/kvscope_app/views/made_up/__init__.py", '"""A view that is made up."""')
    recipe.write(
        "app/kvscope_app/views/made_up/made_up_view.py",
        textwrap.dedent(
            """
            from __future__ import annotations

            from PySide6.QtGui import QPainter

            from kvscope_app.views.base import View


            class MadeUpView(View):
                title = "Made up"
                object_name = "made_up"

                def paintEvent(self, event):
                    QPainter(self).fillRect(self.rect(), self.theme.color("good"))
            """
        ),
    )
    recipe.replace(
        "app/kvscope_app/views/docks.py",
        '    DockSpec("events",',
        """    DockSpec(
        *("made_up", "Made up", "made_up", "MadeUpView", "bottom", 300, "chart", _REQUESTS), pictures="still"
    ),
    DockSpec("events",""",
    )
    recipe.check(
        """
        import argparse
        from pathlib import Path
        from PySide6.QtCore import QSettings, Qt
        from kvscope_app.commands.export import add_export_parser
        from kvscope_telemetry.recordings.sample import sample_recording
        from kvscope_app.ui.theme import DARK
        from kvscope_app.ui.theming.theme_manager import ThemeManager
        from kvscope_app.media_export.offscreen_view import offscreen_application
        from kvscope_app.session.session import Session
        from kvscope_app.window.dock_layouts.arrangement import layout_of, show_layout
        from kvscope_app.window.main_window import MainWindow
        from tests.app.conftest import FakeEngine, poll_all

        parser = add_export_parser(argparse.ArgumentParser().add_subparsers())
        asked = [str(sample_recording()), "--out", "made_up.png", "--view", "made-up", "--size", "200x200"]
        args = parser.parse_args(asked)
        assert args.run(args) == 0 and Path("made_up.png").stat().st_size

        app = offscreen_application()
        settings = QSettings("settings.ini", QSettings.Format.IniFormat)
        engine = FakeEngine()
        session = Session(engine.source)
        poll_all(session)
        window = MainWindow(session, ThemeManager(app, settings, "dark"), settings)
        window.resize(1500, 900)
        window.show()
        while "made_up" not in window.views:
            app.processEvents()
        window.reset_layout()  # as at the first start in a window of this size
        dock = window.docks["made_up"]
        assert dock.windowTitle() == "Made up"
        assert window.dockWidgetArea(dock) == Qt.DockWidgetArea.BottomDockWidgetArea
        assert window.docks["requests"] in window.tabifiedDockWidgets(dock)
        menus = [action.text() for menu in window.menuBar().findChildren(type(window.menuBar().actions()[0].menu()))
                 for action in menu.actions()]
        assert "Go to Made up" in menus, menus
        window.actions_by_name["focus_made_up"].trigger()
        app.processEvents()
        assert not dock.visibleRegion().isEmpty()
        layout = layout_of(window)
        assert "made_up" in layout.view_names()
        show_layout(window, layout)
        window.actions_by_name["toggle_made_up"].trigger()
        assert dock.isHidden()
        window.close()
        session.close()
        """
    )
    folder = "app/kvscope_app/views/made_up/"
    assert {path for path in recipe.files if not path.startswith(folder)} == listed_files("view")


def test_recipe_for_a_predefined_alarm_is_complete(recipe: Recipe) -> None:
    rule = 'Rule(name="Many refusals", expression="refused_per_s > 2", seconds=1.0)'
    rules = "engine/kvscope_telemetry/alarms/rules.py"
    recipe.replace(rules, '    Rule(name="Engine stuck"', f'    {rule},\n    Rule(name="Engine stuck"')
    recipe.check(
        """
        from PySide6.QtWidgets import QApplication
        from kvscope_app.ui.theme import DARK
        from kvscope_app.alarms.alarm_dialog import AlarmDialog
        from kvscope_app.alarms.alarm_evaluator import AlarmEvaluator
        from kvscope_app.session.session import Session
        from kvscope_app.settings.settings_store import SettingsStore
        from kvscope_telemetry.alarms.alarm_engine import AlarmEngine, alarm_text
        from kvscope_telemetry.alarms.rules import DEFAULT_RULES
        from kvscope_telemetry.summaries.session_overview import SessionOverview
        from kvscope_telemetry.summaries.summary import SECOND_NS, Summary
        from PySide6.QtCore import QSettings
        from tests.app.conftest import FakeEngine, poll_all

        overview = SessionOverview()
        refused = [5 if second in (8, 9, 10) else 0 for second in range(20)]
        overview.extend(Summary(time_ns=at * SECOND_NS, epoch=1, refused=num) for at, num in enumerate(refused))
        rang = AlarmEngine(DEFAULT_RULES).read(overview, 0, len(overview))
        assert [alarm_text(alarm) for alarm in rang if alarm.name == "Many refusals"], rang

        app = QApplication([])
        keeper = SettingsStore(QSettings("settings.ini", QSettings.Format.IniFormat))
        assert "Many refusals" in [rule.name for rule in keeper.values.alarm_rules]
        engine = FakeEngine()
        session = Session(engine.source)
        poll_all(session)
        watch = AlarmEvaluator(session, keeper)
        sheet = AlarmDialog(watch, DARK, None)
        row = next(row for row in sheet.rows if row.name.text() == "Many refusals")
        assert row.expression.text() == "refused_per_s > 2" and row.on_box.isChecked()
        session.close()
        """
    )
    assert set(recipe.files) == listed_files("predefined alarm")


@pytest.mark.parametrize("column", ["flops", "lost_blocks"], ids=["of what is counted", "of what nobody counts yet"])
def test_recipe_for_a_figure_of_a_run_is_complete(recipe: Recipe, column: str) -> None:
    figures, summary = (f"engine/kvscope_telemetry/summaries/{name}.py" for name in ("run_figures", "summary"))
    recipe.replace(
        figures,
        '    _counted("draft_tokens", ',
        f'''    _counted(
        "{column}",
        "Made-up things",
        "things",
        "Things that are made up",
        is_compared=True,
        uses=FigureUses(Card(16, "in {{num_steps}} steps"), CACHE, in_range=True),
    ),
    _counted("draft_tokens", ''',
    )
    if column == "lost_blocks":
        recipe.replace(summary, "    schedule_ns: int = 0\n", "    lost_blocks: int = 0\n    schedule_ns: int = 0\n")
    recipe.check(
        f'''
        COLUMN = "{column}"
        '''
        + """
        import argparse, contextlib, io, json
        from pathlib import Path
        from msgspec.structs import replace
        from kvscope_app.commands.info import add_info_parser
        from kvscope_app.views.timeline.measured_range import measure_range
        from kvscope_app.views.timeline.request_lanes import RequestLanes
        from kvscope_app.session.time_span import TimeSpan
        from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES
        from kvscope_telemetry.alarms.rules import parse_rule
        from kvscope_telemetry.exports.comparison.comparison import Run, compare
        from kvscope_telemetry.exports.export import ExportTarget, export
        from kvscope_telemetry.exports.span import span_of
        from kvscope_telemetry.messages.telemetry import Frame
        from kvscope_telemetry.recordings.overview import read_overview
        from kvscope_telemetry.recordings.reader import Recording
        from kvscope_telemetry.recordings.writer import RecordingWriter
        from tests.telemetry.exports.conftest import story

        with RecordingWriter(Path("told.mcap")) as writer:
            for message in story():  # each frame: 14 more
                if isinstance(message, Frame):
                    counters = replace(message.counters, lost_blocks=14 * message.seq)
                    message = replace(message, counters=counters)
                writer.write(message, wait=True)
        recording = Recording.open(writer.path)
        overview, span = read_overview(recording), span_of(recording)
        total = 112

        parser = add_info_parser(argparse.ArgumentParser().add_subparsers())
        args = parser.parse_args([str(writer.path), "--json"])
        with contextlib.redirect_stdout(io.StringIO()) as told:
            args.run(args)
        found = json.loads(told.getvalue())
        assert found["figures"][COLUMN] == found["totals"][COLUMN] == total, found["figures"][COLUMN]

        export(recording, ExportTarget.from_path(Path("report.html")))
        report = Path("report.html").read_text()
        assert "Made-up things" in report and f"{total:,}" in report and "in 8 steps" in report
        export(recording, ExportTarget.from_path(Path("metrics.csv")))
        head, *rows = [line.split(",") for line in Path("metrics.csv").read_text().splitlines()]
        assert sum(int(row[head.index(COLUMN)]) for row in rows) == total

        run = Run(recording, overview, span)
        row = next(row for row in compare(run, run).rows if row.key == COLUMN)
        assert (row.label, row.a, row.b) == ("Made-up things", total, total)

        figure = SECOND_FIGURES[f"{COLUMN}_per_s"]
        assert (figure.label, figure.group) == ("Made-up things per second", "Cache")
        assert parse_rule(f"{COLUMN}_per_s > 100 for 5 s")

        whole = TimeSpan(span.from_ns - 10**9, span.until_ns + 10**9)
        shown = measure_range(overview, RequestLanes(), whole, span.until_ns)
        assert dict(shown.rows)["Made-up things"] == str(total)
        """
    )
    needed = {figures} if column == "flops" else {figures, summary}
    assert set(recipe.files) == needed
    assert needed <= listed_files("figure of a run") == {figures, summary}


def test_recipe_for_an_export_kind_is_complete(recipe: Recipe) -> None:
    table, kinds = (f"engine/kvscope_telemetry/exports/{name}.py" for name in ("tables/pauses_table", "kinds"))
    recipe.write(
        table,
        textwrap.dedent(
            """
            from kvscope_telemetry.exports.tables.recording_description import about
            from kvscope_telemetry.exports.tables.table import Column, Table


            def pauses_table(content):
                stops = list(content.overview.stops.within(content.span.from_ns, content.span.until_ns))
                begins = Column("begin_ns", "int", [stop.begin_ns for stop in stops], "ns", "since 1970")
                return Table("pauses", (begins,), about(content.recording, content.span))
            """
        ),
    )
    recipe.replace(
        kinds,
        '    TableKind("devices"',
        '    TableKind("pauses", "pause", "pauses_table", "pauses_table"),\n    TableKind("devices"',
    )
    recipe.check(
        """
        import argparse, os
        from pathlib import Path
        os.environ["COLUMNS"] = "1000"
        from PySide6.QtCore import QSettings
        from PySide6.QtWidgets import QApplication
        from kvscope_app.commands.export import add_export_parser
        from kvscope_telemetry.recordings.sample import sample_recording
        from kvscope_app.ui.theming.theme_manager import ThemeManager
        from kvscope_app.recording.export_dialog import ExportDialog
        from kvscope_app.session.session import Session
        from kvscope_app.window.main_window import MainWindow
        from kvscope_telemetry.playback.playback_source import PlaybackSource
        from kvscope_telemetry.recordings.reader import Recording

        sample = str(sample_recording())
        parser = add_export_parser(argparse.ArgumentParser().add_subparsers())
        assert "pauses has a row per pause" in parser.format_help()
        for asked in (["pauses.csv"], ["others.csv", "--kind", "pauses"]):
            args = parser.parse_args([sample, "--out", *asked])
            assert args.run(args) == 0
            assert Path(asked[0]).read_text("utf-8-sig").splitlines()[0] == "begin_ns"

        app = QApplication([])
        settings = QSettings("settings.ini", QSettings.Format.IniFormat)
        session = Session(PlaybackSource(Recording.open(sample), is_playing=False))
        while not session.is_overview_complete:
            session.poll()
        window = MainWindow(session, ThemeManager(app, settings, "dark"), settings)
        dialog = ExportDialog(window)
        dialog.content.setCurrentText("Table of pauses")
        selection = dialog.selection()
        assert (selection.kind, selection.path.name.endswith("-pauses.csv")) == ("pauses", True)
        window.close()
        session.close()
        """
    )
    assert {path for path in recipe.files if path != table} == listed_files("export kind (a table)")
