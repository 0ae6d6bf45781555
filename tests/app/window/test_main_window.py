"""Tests of the main window: views, layout, theme, shortcuts, command palette, and engine messages."""

from __future__ import annotations

import sys

import pytest
import shiboken6
from PySide6.QtCore import QSettings, Qt
from PySide6.QtWidgets import QLineEdit, QListWidget, QMessageBox, QProgressBar, QPushButton
from tests.app import window_driver as driver

from kvscope_app.actions.command_palette import NOTHING_FOUND, CommandPalette, action_text, match_rank
from kvscope_app.settings.settings_store import read_settings
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.base import View
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.page_map.color_modes import COLOR_MODES, OWNER, STATE
from kvscope_app.views.visibility import is_on_screen
from kvscope_app.window import dock_state
from kvscope_app.window.main_window import MainWindow
from kvscope_app.window.window_actions import entries
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import Control, Failed
from kvscope_telemetry.source import SourceState, Update


def test_emitting_signals_keeps_reference_counts(session):
    """PySide6 6.12 on Python 3.11 loses one reference to True per emitted signal, and crashes after some hundred."""
    before = sys.getrefcount(True), sys.getrefcount(None)
    for _ in range(200):
        session.status_changed.emit()
        session.timeline.updated.emit(Update())
    after = sys.getrefcount(True), sys.getrefcount(None)
    assert all(abs(b - a) < 50 for a, b in zip(before, after, strict=True))


def test_all_views_load_refresh_and_follow_the_theme(engine, session, make_window, poll):
    engine.request(1, blocks=[3])
    engine.write_blocks([3])
    poll(session)
    window = make_window(session, with_views=True, size=(1500, 900))
    assert set(window.views) == {"page_map", *(spec.name for spec in DOCKS)}
    for name, view in window.views.items():
        assert isinstance(view, View), name
        view.refresh()
    window.themes.choose("light")
    window.themes.finish()
    assert all(view.theme is LIGHT for view in window.views.values())
    assert window.grab().width() == 1500


def test_view_that_becomes_visible_has_the_current_theme(engine, session, make_window, poll, qtbot):
    engine.write_blocks([3])
    poll(session)
    window = make_window(session, with_views=("requests", "timeline"), size=(1500, 900))
    window.focus_view("requests")
    qtbot.waitUntil(lambda: is_on_screen(window.views["requests"]) and not is_on_screen(window.views["timeline"]))
    window.themes.choose("light")
    assert window.views["requests"].theme is LIGHT
    window.focus_view("timeline")
    qtbot.waitUntil(lambda: is_on_screen(window.views["timeline"]))
    assert window.views["timeline"].theme is LIGHT
    window.themes.choose("dark")
    window.focus_view("requests")
    window.close()
    window.themes.finish()


def test_welcome_page_shows_loading_progress_until_there_is_a_pool(make_engine, make_session, make_window, poll):
    engine = make_engine()
    first = engine.source.updates.popleft()
    engine.set_status(SourceState.LOADING)
    session = make_session(engine)
    window = make_window(session)
    assert window.welcome.isVisible()
    engine.progress("download", done=25 << 20, total=100 << 20, unit="bytes", detail="model.gguf")
    poll(session)
    assert "Downloading the model" in driver.visible_texts(window.welcome)
    assert "model.gguf: 25.0 MiB of 100.0 MiB" in driver.visible_text(window.welcome)
    assert driver.only_child(window.welcome, QProgressBar).value() == 250
    engine.progress("warm up")
    poll(session)
    assert driver.only_child(window.welcome, QProgressBar).maximum() == 0
    engine.source.updates.append(first)
    poll(session)
    assert not window.welcome.isVisible()
    assert window.page_map.isVisible()
    assert "fake-135M" in window.windowTitle()


def test_ended_engine_is_reported_and_its_last_state_stays_visible(engine, session, make_window, poll):
    engine.write_blocks([1, 2])
    poll(session)
    window = make_window(session)
    engine.set_status(SourceState.ENDED, "the engine stopped unexpectedly")
    session.poll()
    assert "stopped unexpectedly" in window.banner.text
    assert session.mirror.num_active == 2
    engine.restart(epoch=11)
    poll(session)
    assert window.banner.text == ""


def test_stuck_engine_is_reported_until_it_recovers(engine, session, make_window):
    window = make_window(session)
    engine.set_status(SourceState.STUCK, "step 4 has not finished for 6 s")
    session.poll()
    assert "stuck" in window.banner.text
    engine.set_live()
    session.poll()
    assert window.banner.text == ""


def test_failed_command_is_shown_in_the_status_bar(engine, session, make_window, poll):
    window = make_window(session)
    engine.source.replies.append(Failed(reason="no such thing"))
    poll(session)
    assert window.statusBar().currentMessage() == "no such thing"


def test_space_pauses_and_end_goes_live(session, make_window, qtbot):
    window = make_window(session)
    window.page_map.canvas.setFocus()
    qtbot.waitUntil(window.isActiveWindow)
    qtbot.keyClick(window.page_map.canvas, Qt.Key.Key_Space)
    assert session.timeline.is_paused
    assert "PAUSED" in driver.current_view_text(window)
    assert window.actions_by_name["to_end"].isEnabled()
    qtbot.keyClick(window.page_map.canvas, Qt.Key.Key_End)
    assert not session.timeline.is_paused
    assert driver.current_view_text(window) == "LIVE"


def test_space_presses_a_focused_button_instead(session, make_window, qtbot):
    window = make_window(session)
    qtbot.waitUntil(window.isActiveWindow)
    button = QPushButton("Go", window)
    button.show()
    button.setFocus()
    qtbot.waitUntil(button.hasFocus)
    with qtbot.waitSignal(button.clicked, timeout=120_000):
        qtbot.keyClick(button, Qt.Key.Key_Space)
    assert not session.timeline.is_paused


def test_single_key_shortcuts_do_not_apply_while_typing(session, make_window, qtbot):
    window = make_window(session)
    qtbot.waitUntil(window.isActiveWindow)
    line = QLineEdit(window)
    line.show()
    line.setFocus()
    qtbot.waitUntil(line.hasFocus)
    qtbot.keyClicks(line, "f2 ?-+")
    assert line.text() == "f2 ?-+"
    assert not session.timeline.is_paused
    assert window.page_map.mode is STATE


@pytest.mark.parametrize(("index", "mode"), list(enumerate(COLOR_MODES, start=1)))
def test_number_keys_choose_the_color_mode(index, mode, make_engine, make_session, make_window, poll, qtbot):
    session = make_session(make_engine(capabilities=Capabilities(attention=True, groups=True, eviction_order=True)))
    poll(session)
    window = make_window(session)
    window.page_map.canvas.setFocus()
    qtbot.waitUntil(window.isActiveWindow)
    window.page_map.set_mode(STATE)
    qtbot.keyClick(window.page_map.canvas, Qt.Key(Qt.Key.Key_0.value + index))
    assert window.page_map.mode is mode
    assert window.actions_by_name[f"color_{mode}"].isChecked()


def test_every_shortcut_belongs_to_one_action(session, make_window):
    window = make_window(session, attach=lambda address: None)
    keys = [key.toString() for _, action in entries(window) for key in action.shortcuts()]
    assert len(keys) == len(set(keys))


def test_every_action_has_text_and_its_icon(session, make_window):
    window = make_window(session, attach=lambda address: None)
    for spec in window.actions_by_name:
        action = window.actions_by_name[spec.name]
        assert action.text()
        assert bool(spec.icon) == (not action.icon().isNull())


def test_toggled_theme_is_saved(session, make_window, settings):
    window = make_window(session)
    window.actions_by_name["theme_toggle"].trigger()
    assert window.themes.theme is LIGHT
    assert read_settings(settings).theme == "light"
    assert window.actions_by_name["theme_light"].isChecked()
    window.actions_by_name["theme_dark"].trigger()
    assert window.themes.theme is DARK


def test_layout_is_saved_and_can_be_reset(session, make_window, settings):
    window = make_window(session)
    window.docks["memory"].hide()
    window.close()
    again = make_window(session)
    assert not again.docks["memory"].isVisible()
    again.reset_layout()
    assert again.docks["memory"].isVisible()


MUTE = Capabilities(engine="sglang", completions=False)


@pytest.mark.parametrize("with_views", [False, True])
def test_console_is_hidden_if_the_engine_takes_no_prompts(session, make_engine, make_session, make_window, with_views):
    window = make_window(make_session(make_engine(capabilities=MUTE)), with_views=with_views, size=(1500, 900))
    console = window.docks["console"]
    assert console.isHidden()
    assert not window.undo.canUndo()
    window.reset_layout()
    assert console.isHidden()
    console.show()
    assert console.isVisible()
    console.hide()
    window.close()
    assert make_window(session).docks["console"].isVisible()


def test_console_is_shown_again_for_an_engine_that_takes_prompts(make_engine, make_session, make_window, poll):
    engine = make_engine(capabilities=MUTE)
    session = make_session(engine)
    window = make_window(session)
    assert window.docks["console"].isHidden()
    engine.capabilities = Capabilities()
    engine.restart(epoch=12)
    poll(session)
    assert window.docks["console"].isVisible()


def test_views_that_load_later_do_not_change_the_restored_layout(session, make_window, qtbot):
    window = make_window(session, with_views=True, size=(1500, 900))
    window.resizeDocks([window.docks["console"]], [350], Qt.Orientation.Horizontal)
    qtbot.waitUntil(lambda: window.docks["console"].width() == 350, timeout=120_000)
    window.close()
    again = make_window(session, with_views=True, size=(1500, 900))
    assert abs(again.docks["console"].width() - 350) <= 1


def test_layout_of_another_version_is_not_restored(session, make_window, settings):
    window = make_window(session)
    settings.setValue("window/state", window.saveState(dock_state.LAYOUT_VERSION + 1))
    assert not dock_state.restore(window, settings)
    settings.setValue("window/state", "nonsense")
    assert not dock_state.restore(window, settings)


def test_layout_of_a_larger_maximized_window_opens_maximized(session, make_window, settings, qtbot):
    """Qt 6.11 crashed in the second restoreState after a window was shown that is too small for its layout."""
    wide = make_window(session, size=(3000, 900))
    wide.resizeDocks([wide.docks["throughput"]], [2000], Qt.Orientation.Horizontal)
    wide.setWindowState(Qt.WindowState.WindowMaximized)  # set after the window was shown, as a user does
    wide.close()
    again = make_window(session, with_views=True)
    assert again.isMaximized()
    assert again.width() < 2000
    assert again.docks["throughput"].isVisible()


@pytest.mark.qt_log_ignore("grabbing the keyboard", extend=True)
def test_command_palette_finds_and_runs_an_action(session, make_window, qtbot):
    window = make_window(session)
    window.actions_by_name["palette"].trigger()
    (palette,) = window.findChildren(CommandPalette)
    qtbot.keyClicks(driver.only_child(palette, QLineEdit), "colour by ow")
    assert driver.only_child(palette, QListWidget).count() >= 1
    qtbot.keyClick(driver.only_child(palette, QLineEdit), Qt.Key.Key_Return)
    assert window.page_map.mode is OWNER


@pytest.mark.qt_log_ignore("grabbing the keyboard", extend=True)
def test_command_palette_shows_a_message_if_nothing_matches(session, make_window, qtbot):
    window = make_window(session)
    window.actions_by_name["palette"].trigger()
    (palette,) = window.findChildren(CommandPalette)
    qtbot.keyClicks(driver.only_child(palette, QLineEdit), "zzqqy")
    assert driver.list_texts(driver.only_child(palette, QListWidget)) == [NOTHING_FOUND]
    for key in (Qt.Key.Key_Down, Qt.Key.Key_Return):
        qtbot.keyClick(driver.only_child(palette, QLineEdit), key)
    assert palette.isVisible(), "no entry was run"
    driver.only_child(palette, QLineEdit).clear()
    qtbot.keyClicks(driver.only_child(palette, QLineEdit), "segments")
    assert [action_text(driver.only_child(palette, QListWidget).item(0).data(Qt.ItemDataRole.UserRole))] == [
        "PyTorch memory segments…"
    ]
    palette.close()


def test_file_menu_contains_the_expected_actions_in_order(session, make_window):
    window = make_window(session, open_recording=print, attach=print)
    (file,) = [action.menu() for action in window.menuBar().actions() if action.text() == "&File"]
    names = [action.objectName() for action in file.actions() if action.objectName()]
    assert names[0] == "open"
    assert names[-2:] == ["close", "quit"]
    assert {"recordings", "attach", "record", "keep_last", "compare", "export", "save_picture"} <= set(names)
    assert window.actions_by_name["record"].shortcut().toString() == "Ctrl+R"


def test_command_palette_ranks_word_beginnings_first():
    typed = "zoom"
    assert match_rank(typed, "Zoom in", "Page map") < match_rank("oom", "Zoom in", "Page map")
    assert match_rank("zi", "Zoom in", "Page map") is not None


def test_command_palette_ranks_a_whole_name_first():
    assert match_rank("recordings", "Recordings…", "Engine") < match_rank(
        "recordings", "Include prompt text in recordings", "Time"
    )
    assert match_rank("x", "Zoom in", "Page map") is None


@pytest.mark.parametrize("name", ["shortcuts", "about", "attach"])
def test_dialogs_open_non_modal_and_close(name, session, make_window):
    window = make_window(session, attach=lambda address: None)
    window.actions_by_name[name].trigger()
    (dialog,) = window.findChildren(Sheet)
    assert dialog.isVisible()
    assert not dialog.isModal()
    dialog.close()


def test_shortcuts_dialog_lists_every_action_with_a_key(session, make_window):
    from PySide6.QtWidgets import QLabel

    window = make_window(session)
    window.actions_by_name["shortcuts"].trigger()
    (dialog,) = window.findChildren(Sheet)
    words = {label.text() for label in dialog.findChildren(QLabel)}
    for _, action in entries(window):
        if action.shortcuts():
            assert action_text(action).rstrip("…") in words


def test_attach_dialog_passes_valid_addresses_on_and_refuses_others(session, make_window, qtbot):
    opened = []
    window = make_window(session, attach=opened.append)
    window.actions_by_name["attach"].trigger()
    (dialog,) = window.findChildren(Sheet)
    dialog.fields.address_line.setText("http://nowhere")
    driver.click_button(dialog, "Attach")
    assert "http://nowhere" in driver.visible_text(dialog)
    assert opened == []
    dialog.fields.address_line.setText("tcp://127.0.0.1:5555")
    driver.click_button(dialog, "Attach")
    assert opened == [Address("tcp://127.0.0.1:5555")]


def test_pause_action_sends_a_command_with_a_lease(engine, session, make_window):
    window = make_window(session)
    window.actions_by_name["pause_engine"].trigger()
    (command,) = engine.source.sent
    assert command == Control(action="pause", lease_s=5.0, tag=command.tag)


@pytest.mark.parametrize("sure", [True, False])
def test_prefix_cache_is_reset_only_after_confirmation(engine, session, make_window, sure):
    window = make_window(session)
    window.actions_by_name["reset_cache"].trigger()
    (question,) = window.findChildren(QMessageBox)
    assert "Reset the prefix cache?" in question.text()
    assert engine.source.sent == []
    assert question.defaultButton().text().replace("&", "") == "Cancel"
    next(b for b in question.buttons() if b.text().startswith("Reset") == sure).click()
    tags = [command.tag for command in engine.source.sent]
    assert engine.source.sent == ([Control(action="reset_prefix_cache", tag=tags[0])] if sure else [])


def test_status_bar_shows_model_losses_and_latency(engine, session, make_window, poll, qtbot):
    window = make_window(session)
    engine.write_blocks([1])
    poll(session)
    from kvscope_telemetry.source import SourceStatus

    engine.source.status = SourceStatus(
        SourceState.LIVE, frames_received=12_345, frames_dropped=3, messages_rejected=1, latency_ns=420_000
    )
    driver.poll_until(session, lambda: session.status == engine.source.status, qtbot)
    texts = {name: driver.status_label(window, name).text() for name in ("state", "model", "frames", "latency")}
    assert texts["state"] == "Live"
    assert "fake-135M" in texts["model"]
    assert "3 lost" in texts["frames"]
    assert "1 unreadable" in texts["frames"]
    assert "420 µs" in texts["latency"]


def test_small_window_keeps_a_usable_map(engine, session, make_window, poll):
    engine.write_blocks([1])
    poll(session)
    window = make_window(session, size=(760, 520))
    assert window.width() <= 900
    assert window.page_map.canvas.width() >= 180


def test_settings_format_is_ini(settings):
    assert settings.format() is QSettings.Format.IniFormat


def tabbed_with(window, name):
    return {dock.objectName() for dock in window.tabifiedDockWidgets(window.docks[name])}


def is_in_front(window, name):
    """Docks behind another tab are positioned outside the window."""
    return window.rect().intersects(window.docks[name].geometry())


def test_default_layout_shows_timeline_above_requests_and_both_wider_than_the_map(session, make_window, qtbot):
    window = make_window(session, size=(1500, 900))
    window.reset_layout()
    timeline, requests = window.docks["timeline"], window.docks["requests"]
    assert {"dock_requests", "dock_events", "dock_prefixes"} <= tabbed_with(window, "what_if")
    assert tabbed_with(window, "timeline") == {"dock_heatmap"}
    qtbot.waitUntil(
        lambda: all(is_in_front(window, name) for name in ("throughput", "timeline", "requests")), timeout=120_000
    )
    assert not any(is_in_front(window, name) for name in ("what_if", "memory", "heatmap"))
    assert timeline.geometry().bottom() < requests.geometry().top()
    for dock in (timeline, requests):
        assert dock.width() > window.page_map.width()
        assert dock.geometry().right() == window.docks["throughput"].geometry().right()


def test_default_layout_of_a_small_window_uses_tabs(session, make_window, qtbot):
    window = make_window(session, size=(1300, 720))
    window.reset_layout()
    assert {"dock_requests", "dock_timeline", "dock_events"} <= tabbed_with(window, "what_if")
    qtbot.waitUntil(lambda: is_in_front(window, "requests") and not is_in_front(window, "timeline"), timeout=120_000)
    window.resize(1040, 640)
    window.reset_layout()
    assert {"dock_throughput", "dock_memory", "dock_requests", "dock_timeline"} <= tabbed_with(window, "what_if")
    qtbot.waitUntil(lambda: is_in_front(window, "throughput") and not is_in_front(window, "what_if"), timeout=120_000)


def test_small_window_keeps_its_size_while_views_are_loaded(engine, session, make_window, poll, qtbot):
    poll(session)
    window = make_window(session, with_views=True, size=(1040, 640))
    qtbot.waitUntil(lambda: len(window.views) == len(DOCKS) + 1, timeout=120_000)
    assert window.width() == 1040
    assert window.minimumSizeHint().width() <= 1040


def test_closed_window_ignores_signals_of_its_session(engine, session, make_window, poll):
    poll(session)
    window = make_window(session, with_views=("what_if",))
    window.close()
    what_if = window.views["what_if"]
    window.refresher.touch_all()
    assert not what_if.process.is_running
    calls = []
    for name in ("pause_engine", "resume", "reset_cache"):
        window.actions_by_name[name].changed.connect(lambda: calls.append(True))
    session.status_changed.emit()
    assert calls == []


def test_window_deleted_without_closing_raises_nothing(session, themes, settings, qtbot):
    """This happens at the end of the process: docks report their destruction after that of the window."""
    window = MainWindow(session, themes, settings)
    with qtbot.waitSignal(window.views_loaded):
        window.show()
    with qtbot.captureExceptions() as exceptions:
        shiboken6.delete(window)
    assert exceptions == []
