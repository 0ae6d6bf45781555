"""Settings of this process for all its windows, with notification of changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, get_origin, get_type_hints

import msgspec
from PySide6.QtCore import QObject, QSettings, Signal

from kvscope_app.settings.settings import Settings
from kvscope_telemetry import operating_system
from kvscope_telemetry.whole_file import write_whole

_TYPES: Final[dict[str, Any]] = get_type_hints(Settings, include_extras=True)
_MAX_BYTES: Final = 4 << 20
"""Maximum size in bytes of a settings file that is read. kvscope does not write larger ones."""

RawFields = dict[str, msgspec.Raw]


def settings_file(settings: QSettings) -> SettingsFile:
    """Return the JSON file next to the INI file, with the same stem."""
    return SettingsFile(Path(settings.fileName()).with_suffix(".json"))


def read_settings(settings: QSettings) -> Settings:
    return settings_file(settings).read()


class SettingsStore(QObject):
    """Current settings in `values`. A change that cannot be written remains in effect for this run."""

    changed = Signal(object)
    """Emitted with the previous `Settings` when `values` has changed, in this or another process."""
    write_failed = Signal(str)
    """Emitted with the reason why a change could not be written."""

    def __init__(self, settings: QSettings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._file = settings_file(settings)
        self._stamp = self._file.stamp
        self.values = read_settings(settings)

    def change(self, **fields: object) -> None:
        self.change_by(lambda _: fields)

    def change_by(self, compute: Callable[[Settings], Mapping[str, object]]) -> None:
        """Set fields to values that `compute` returns for the current settings, which another process may have
        changed.
        """
        before = self.values
        try:
            self.values = self._file.change(compute)
            self._stamp = self._file.stamp
        except OSError as error:
            self.values = msgspec.structs.replace(before, **compute(before))
            self.write_failed.emit(error.strerror or str(error))
        if self.values != before:
            self.changed.emit(before)

    def reload(self) -> None:
        """Load changes made by other processes. Without changes, this takes one `stat` of the file."""
        stamp = self._file.stamp
        if stamp == self._stamp or not self._file.exists:
            return
        self._stamp, before = stamp, self.values
        self.values = self._file.read()
        if self.values != before:
            self.changed.emit(before)


class SettingsFile:
    """The settings file, a JSON object at `path`: reads each field separately and writes only changed fields.

    A value that cannot be read (damaged, or from a later version) is replaced by its default. It remains in the file
    until the field is changed, and so do fields of a later version. A change is applied to the file's present contents
    under a lock, so that processes that change different fields do not overwrite each other's changes. The lock file is
    next to `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @property
    def stamp(self) -> tuple[int, int]:
        """Modification time in ns and inode of the file, which change with each write; (0, 0) without a file."""
        try:
            status = self.path.stat()
        except OSError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino

    def read(self) -> Settings:
        """Return the settings, with defaults for missing and unreadable values."""
        return _decode_settings(self._read_fields())

    def change(self, compute: Callable[[Settings], Mapping[str, object]]) -> Settings:
        """Set the fields that `compute` returns for the file's present contents. Raises OSError if writing fails."""
        with self._locked():
            fields = self._read_fields()
            changes = compute(_decode_settings(fields))
            for name, value in changes.items():
                fields[name] = msgspec.Raw(_encode_field(name, value))
            self._write(msgspec.json.format(msgspec.json.encode(fields), indent=1))
            return _decode_settings(fields)

    def _read_fields(self) -> RawFields:
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                return {}
            return msgspec.json.decode(self.path.read_bytes(), type=RawFields)
        except (OSError, ValueError, msgspec.MsgspecError):
            return {}

    def _write(self, data: bytes) -> None:
        write_whole(self.path, data, private=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_path = self.path.with_name(self.path.name + ".lock")
        descriptor = os.open(lock_path, operating_system.LOCK_FILE_FLAGS | os.O_CREAT, 0o600)
        try:
            operating_system.lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)


def _encode_field(name: str, value: object) -> bytes:
    """Encode a value. Raises ValueError if the result could not be decoded again."""
    data = msgspec.json.encode(value)
    msgspec.json.decode(data, type=_TYPES[name])
    return data


def _decode_settings(fields: RawFields) -> Settings:
    values = {name: _decode_field(name, raw) for name, raw in fields.items() if name in _TYPES}
    return Settings(**{name: value for name, value in values.items() if value is not msgspec.UNSET})


def _decode_field(name: str, raw: msgspec.Raw) -> Any:
    """Decode a field; returns UNSET if it is unreadable. Unreadable entries of a dictionary are left out."""
    try:
        if get_origin(_TYPES[name]) is not dict:
            return msgspec.json.decode(raw, type=_TYPES[name])
        kind = _TYPES[name].__args__[1]
        entries = msgspec.json.decode(raw, type=RawFields)
    except (ValueError, msgspec.MsgspecError):
        return msgspec.UNSET
    readable = {}
    for key, entry in entries.items():
        with suppress(ValueError, msgspec.MsgspecError):
            readable[key] = msgspec.json.decode(entry, type=kind)
    return readable
