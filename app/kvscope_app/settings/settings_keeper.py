"""Holds the settings of this process and tells who follows them. One for all windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from PySide6.QtCore import QObject, QSettings, Signal

from kvscope_app.settings.old_settings import old_choices
from kvscope_app.settings.settings import Settings
from kvscope_app.settings.settings_file import SettingsFile


def settings_file(settings: QSettings) -> SettingsFile:
    """Beside the INI file, under its name."""
    return SettingsFile(Path(settings.fileName()).with_suffix(".json"))


def read_settings(settings: QSettings) -> Settings:
    """What is chosen now; of earlier versions, where nothing was chosen since."""
    file = settings_file(settings)
    return file.read() if file.exists else msgspec.structs.replace(Settings(), **old_choices(settings))


class SettingsKeeper(QObject):
    """`values` are those of now. Where the disk takes no change, it holds for this run, and `failure` says why."""

    changed = Signal(object)
    """The `Settings` of before: who follows looks at what is another now."""

    def __init__(self, settings: QSettings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._file = settings_file(settings)
        self._stamp = self._file.stamp
        self.failure = ""
        self.values = read_settings(settings)
        if not self._file.exists and (old := old_choices(settings)):
            self.change(**old)

    def change(self, **fields: object) -> None:
        """Set these fields, here and in the file."""
        self.change_by(lambda _: fields)

    def change_by(self, make: Callable[[Settings], Mapping[str, object]]) -> None:
        """The same for fields that are made of what is there, which another process may have changed meanwhile."""
        before = self.values
        try:
            self.values = self._file.change(make)
            self._stamp = self._file.stamp
            self.failure = ""
        except OSError as error:
            self.values = msgspec.structs.replace(before, **make(before))
            self.failure = error.strerror or str(error)
        if self.values != before:
            self.changed.emit(before)

    def look(self) -> None:
        """Take in what other processes changed; costs a look at the file's time where there is nothing."""
        stamp = self._file.stamp
        if stamp == self._stamp or not self._file.exists:
            return
        self._stamp, before = stamp, self.values
        self.values = self._file.read()
        if self.values != before:
            self.changed.emit(before)
