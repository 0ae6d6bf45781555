"""Row of the options panel that chooses, saves and manages presets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QInputDialog, QMenu, QToolButton, QWidget

from kvscope_app.ui.widget_factories import label, tool_button
from kvscope_app.views.console.conversation import DEFAULT_SAMPLING, Conversation
from kvscope_app.views.console.presets import OptionsPreset, PresetStore, is_built_in
from kvscope_telemetry.errors import KvscopeError

_CUSTOM: Final = "Custom"


class PresetBar(QWidget):
    """Preset of the conversation that `conversation()` returns.

    `show_options` is called with a conversation whose options were changed here, and `report` with a sentence for the
    user.
    """

    done = Signal(str, object, object)
    """Emitted after an undoable action with the arguments of `View.done`."""

    def __init__(
        self,
        store: PresetStore,
        conversation: Callable[[], Conversation],
        find: Callable[[str], Conversation | None],
        show_options: Callable[[Conversation], None],
        report: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._store, self._conversation, self._find = store, conversation, find
        self._show_options, self._report = show_options, report
        self._presets: list[OptionsPreset] = []
        self._default_name = ""
        self.box = QComboBox()
        self.box.setAccessibleName("Preset")
        self.box.setToolTip("System prompt and sampling options under a name")
        self.box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.box.setMinimumContentsLength(8)
        self.box.activated.connect(self._on_chosen)
        self.button = tool_button("…", "Save, rename or delete presets, or choose one for new conversations")
        self.button.setAccessibleName("Manage presets")
        self.button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.menu = QMenu(self)
        self.menu.aboutToShow.connect(self.fill_menu)
        self.button.setMenu(self.menu)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(label("Preset", "muted"))
        row.addWidget(self.box, 1)
        row.addWidget(self.button)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()

    def refresh(self) -> None:
        """Read the presets, and show the one that the conversation's options are equal to."""
        self._try(self._load)
        names = [preset.name for preset in self._presets]
        self.box.clear()
        self.box.addItems([_CUSTOM, *names])
        self.show_current()

    def show_current(self) -> None:
        current = self.current
        self.box.setCurrentIndex(0 if current is None else 1 + self._presets.index(current))

    @property
    def current(self) -> OptionsPreset | None:
        """Preset that the conversation's options are equal to, or None."""
        conversation = self._conversation()
        return next((p for p in reversed(self._presets) if _is_applied(p, conversation)), None)

    def apply(self, preset: OptionsPreset) -> None:
        conversation = self._conversation()
        before = OptionsPreset(name="", system=conversation.system, sampling=conversation.sampling)
        self._set(conversation.key, preset)
        self.done.emit(
            f"applying the preset “{preset.name}”",
            partial(self._set, conversation.key, before),
            partial(self._set, conversation.key, preset),
        )

    def save_as(self, name: str) -> None:
        """Save the conversation's options under a name. Replacing a preset can be undone."""
        conversation = self._conversation()
        preset = OptionsPreset(name=name.strip(), system=conversation.system, sampling=conversation.sampling)
        before = next((each for each in self._presets if each.name == preset.name), None)
        if self._change(partial(self._store.save, preset)) and before is not None:
            save = partial(self._store.save, preset)
            undo = partial(self._change, partial(self._store.save, before))
            self.done.emit(f"replacing the preset “{preset.name}”", undo, partial(self._change, save))

    def rename(self, name: str, new_name: str) -> None:
        new_name = new_name.strip()
        change = partial(self._change, partial(self._store.rename, name, new_name))
        if change():
            undo = partial(self._change, partial(self._store.rename, new_name, name))
            self.done.emit(f"renaming the preset “{name}”", undo, change)

    def delete(self, preset: OptionsPreset) -> None:
        default_name = self._default_name

        def restore() -> None:
            self._store.save(preset)
            if default_name == preset.name:
                self._store.set_default(preset.name)

        change = partial(self._change, partial(self._store.delete, preset.name))
        if change():
            self.done.emit(f"deleting the preset “{preset.name}”", partial(self._change, restore), change)

    def set_default(self, name: str) -> None:
        self._change(partial(self._store.set_default, name))

    def apply_default(self, conversation: Conversation) -> None:
        """Apply the preset for new conversations to an empty conversation whose options were not changed."""
        is_new = not conversation.messages and not conversation.named and not conversation.system
        if is_new and conversation.sampling == DEFAULT_SAMPLING and (preset := self._default()) is not None:
            conversation.system, conversation.sampling = preset.system or "", preset.sampling

    def template(self, current: Conversation) -> Conversation:
        """Return a conversation with the options for a new one: those of the default preset, else of `current`."""
        preset = self._default()
        if preset is None:
            return current
        system = preset.system or ""
        return Conversation(key="", system=system, sampling=preset.sampling, adapter=current.adapter)

    def fill_menu(self) -> None:
        self.refresh()
        self.menu.clear()
        self.menu.addAction("Save as preset…", self._ask_name)
        current = self.current
        if current is None:
            return
        is_own = not is_built_in(current.name)
        self.menu.addAction("Rename…", partial(self._ask_new_name, current.name)).setEnabled(is_own)
        self.menu.addAction("Delete", partial(self.delete, current)).setEnabled(is_own)
        default = self.menu.addAction("Use for new conversations")
        default.setCheckable(True)
        default.setChecked(current.name == self._default_name)
        default.triggered.connect(lambda is_on: self.set_default(current.name if is_on else ""))

    def _on_chosen(self, row: int) -> None:
        if row > 0:
            self.apply(self._presets[row - 1])
        else:
            self.show_current()

    def _set(self, key: str, preset: OptionsPreset) -> None:
        conversation = self._find(key)
        if conversation is not None:
            if preset.system is not None:
                conversation.system = preset.system
            conversation.sampling = preset.sampling
            self._show_options(conversation)
        self.show_current()

    def _default(self) -> OptionsPreset | None:
        self._try(self._load)
        return next((preset for preset in self._presets if preset.name == self._default_name), None)

    def _load(self) -> None:
        self._presets, self._default_name = self._store.load(), self._store.default_name

    def _change(self, change: Callable[[], None]) -> bool:
        is_changed = self._try(change)
        self.refresh()
        return is_changed

    def _try(self, change: Callable[[], None]) -> bool:
        try:
            change()
        except (KvscopeError, ValueError) as error:  # BadInput is a ValueError
            text = str(error)
            self._report(f"{text[:1].upper()}{text[1:]}.")
            return False
        return True

    def _ask_name(self) -> None:
        dialog = self._dialog("Save preset", "Name (replaces your preset of the same name):")
        dialog.textValueSelected.connect(self.save_as)
        dialog.open()

    def _ask_new_name(self, name: str) -> None:
        dialog = self._dialog("Rename preset", "New name:")
        dialog.setTextValue(name)
        dialog.textValueSelected.connect(partial(self.rename, name))
        dialog.open()

    def _dialog(self, title: str, text: str) -> QInputDialog:
        dialog = QInputDialog(self)
        dialog.setWindowTitle(title)
        dialog.setLabelText(text)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        return dialog


def _is_applied(preset: OptionsPreset, conversation: Conversation) -> bool:
    has_same_system = preset.system is None or preset.system == conversation.system
    return has_same_system and preset.sampling == conversation.sampling
