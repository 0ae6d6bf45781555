"""Holds the settings of this process and tells who follows them. One for all windows."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, get_origin, get_type_hints

import msgspec
from PySide6.QtCore import QObject, QSettings, Signal

from kvscope_app.settings.settings import Settings
from kvscope_telemetry.whole_file import write_whole

_TYPES: Final[dict[str, Any]] = get_type_hints(Settings, include_extras=True)
_MAX_BYTES: Final = 4 << 20
"""Nobody chooses so much: a larger file is not ours."""

Raws = dict[str, msgspec.Raw]


def settings_file(settings: QSettings) -> SettingsFile:
    """Beside the INI file, under its name."""
    return SettingsFile(Path(settings.fileName()).with_suffix(".json"))


def read_settings(settings: QSettings) -> Settings:
    """What is chosen now."""
    return settings_file(settings).read()


class SettingsKeeper(QObject):
    """The settings in `values`. A change that cannot be written is kept for this run."""

    changed = Signal(object)
    """The `Settings` of before: who follows looks at what is another now."""
    write_failed = Signal(str)
    """A change could not be written to the file: the reason."""

    def __init__(self, settings: QSettings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._file = settings_file(settings)
        self._stamp = self._file.stamp
        self.values = read_settings(settings)

    def change(self, **fields: object) -> None:
        """Set these fields, here and in the file."""
        self.change_by(lambda _: fields)

    def change_by(self, make: Callable[[Settings], Mapping[str, object]]) -> None:
        """The same for fields that are made of what is there, which another process may have changed meanwhile."""
        before = self.values
        try:
            self.values = self._file.change(make)
            self._stamp = self._file.stamp
        except OSError as error:
            self.values = msgspec.structs.replace(before, **make(before))
            self.write_failed.emit(error.strerror or str(error))
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


class SettingsFile:
    """The settings' file: reads it field by field, and changes only what is changed.

    A value that cannot be read (damaged, or from a later version) falls back to its default by itself; it stays in
    the file until it is changed here, and so does what a later version put beside it. A change is made to what the
    file says now, under a lock: of two processes that change two things, neither loses its own.

    One JSON object at `path`; the lock lies beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether anything was ever kept here."""
        return self.path.exists()

    @property
    def stamp(self) -> tuple[int, int]:
        """Changes whenever somebody writes."""
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_ino

    def read(self) -> Settings:
        """What it says; defaults for what it does not, or not readably."""
        return _decoded(self._raws())

    def change(self, make: Callable[[Settings], Mapping[str, object]]) -> Settings:
        """Set the fields that `make` gives, of what the file says now. Raises OSError where it cannot be written."""
        with self._locked():
            raws = self._raws()
            changes = make(_decoded(raws))
            for name, value in changes.items():
                raws[name] = msgspec.Raw(_encoded(name, value))
            self._write(msgspec.json.format(msgspec.json.encode(raws), indent=1))
            return _decoded(raws)

    def _raws(self) -> Raws:
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                return {}
            return msgspec.json.decode(self.path.read_bytes(), type=Raws)
        except (OSError, ValueError, msgspec.MsgspecError):
            return {}

    def _write(self, data: bytes) -> None:
        write_whole(self.path, data, private=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = self.path.with_name(self.path.name + ".lock")
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _encoded(name: str, value: object) -> bytes:
    """Raises ValueError for what would not be read again."""
    data = msgspec.json.encode(value)
    msgspec.json.decode(data, type=_TYPES[name])
    return data


def _decoded(raws: Raws) -> Settings:
    values = {name: _value(name, raw) for name, raw in raws.items() if name in _TYPES}
    return Settings(**{name: value for name, value in values.items() if value is not msgspec.UNSET})


def _value(name: str, raw: msgspec.Raw) -> Any:
    """UNSET: it cannot be read. Of a dictionary, its readable entries."""
    try:
        if get_origin(_TYPES[name]) is not dict:
            return msgspec.json.decode(raw, type=_TYPES[name])
        kind = _TYPES[name].__args__[1]
        entries = msgspec.json.decode(raw, type=Raws)
    except (ValueError, msgspec.MsgspecError):
        return msgspec.UNSET
    readable = {}
    for key, entry in entries.items():
        with suppress(ValueError, msgspec.MsgspecError):
            readable[key] = msgspec.json.decode(entry, type=kind)
    return readable
