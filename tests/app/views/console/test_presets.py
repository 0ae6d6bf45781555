"""Tests of presets of a system prompt and sampling options."""

from __future__ import annotations

import pytest

from kvscope_app.views.console.presets import BUILT_IN_PRESETS, PRESETS_FILE, OptionsPreset, PresetStore
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.sampling_params import SamplingParams


@pytest.fixture
def store(tmp_path):
    return PresetStore(tmp_path / "conversations")


@pytest.fixture
def undo_entries(console):
    done = []
    console.view.done.connect(lambda text, undo, redo: done.append((text, undo, redo)))
    return done


def own_names(store):
    return [preset.name for preset in store.load()[len(BUILT_IN_PRESETS) :]]


def test_chosen_preset_sets_the_options_and_can_be_undone(console, undo_entries):
    page = console.page
    page.head.settings.click()
    page.presets.apply(BUILT_IN_PRESETS[0])
    assert page.options.fields["temperature"].text() == "0"
    assert page.presets.box.currentText() == "Precise (greedy)"
    undo_entries[-1][1]()
    assert page.options.fields["temperature"].text() == ""
    assert page.presets.box.currentText() == "Custom"


def test_saved_preset_is_offered_in_other_windows_with_its_system_prompt(console, make_console):
    console.page.options.system.setPlainText("Be brief.")
    console.page.presets.save_as("Brief")
    other = make_console()
    other.page.presets.refresh()
    row = other.page.presets.box.findText("Brief")
    other.page.presets.box.setCurrentIndex(row)
    other.page.presets.box.activated.emit(row)
    assert other.page.options.system.toPlainText() == "Be brief."


def test_default_preset_sets_the_options_of_new_conversations(console, store):
    store.set_default("Creative")
    console.ask("One", "re One")
    console.page.new_conversation()
    assert console.page.current.sampling == BUILT_IN_PRESETS[2].sampling
    store.set_default("")
    console.ask("Two", "re Two")
    console.page.options.system.setPlainText("Be kind.")
    console.page.new_conversation()
    assert console.page.current.system == "Be kind."


def test_deleting_renaming_and_replacing_a_preset_can_be_undone(console, store, undo_entries):
    bar = console.page.presets
    bar.save_as("A")
    bar.set_default("A")
    bar.rename("A", "B")
    assert (own_names(store), store.default_name) == (["B"], "B")
    bar.delete(store.find("B"))
    assert (own_names(store), store.default_name) == ([], "")
    undo_entries[-1][1]()
    assert (own_names(store), store.default_name) == (["B"], "B")
    undo_entries[-2][1]()
    assert own_names(store) == ["A"]


@pytest.mark.parametrize("name", ["", "  ", "x" * 61, "Balanced"])
def test_unusable_name_is_refused(store, name):
    with pytest.raises(BadInput):
        store.save(OptionsPreset(name=name, sampling=SamplingParams()))


def test_rename_to_a_taken_name_is_refused(store):
    for name in ("A", "B"):
        store.save(OptionsPreset(name=name, sampling=SamplingParams()))
    with pytest.raises(BadInput, match="already a preset 'B'"):
        store.rename("A", "B")
    assert own_names(store) == ["A", "B"]


def test_file_that_cannot_be_opened_is_reported_in_one_line(store, tmp_path):
    (tmp_path / "conversations" / PRESETS_FILE).mkdir(parents=True)
    with pytest.raises(KvscopeError, match="the presets were not read: "):
        store.load()
