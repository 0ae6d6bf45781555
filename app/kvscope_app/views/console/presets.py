"""Named sets of a system prompt and sampling options, in an SQLite file shared by all windows. Imports no Qt."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from kvscope_app.sqlite_files import SqliteSchema, open_sqlite
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.sampling_params import SamplingParams

PRESETS_FILE: Final = "presets.sqlite3"
MAX_PRESET_NAME: Final = 60
_SCHEMA: Final = SqliteSchema(
    version=1,
    tables="""
CREATE TABLE IF NOT EXISTS presets (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS default_preset (id INTEGER PRIMARY KEY CHECK (id = 1), name TEXT NOT NULL);
""",
    probe="SELECT presets.name, presets.data, default_preset.name FROM presets, default_preset LIMIT 0",
    contents="presets",
)


class OptionsPreset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    system: str | None = None
    """System prompt; None leaves that of the conversation."""
    sampling: SamplingParams


BUILT_IN_PRESETS: Final = (
    OptionsPreset(name="Precise (greedy)", sampling=SamplingParams(temperature=0.0, max_tokens=512)),
    OptionsPreset(name="Balanced", sampling=SamplingParams(temperature=0.7, top_p=0.95, max_tokens=512)),
    OptionsPreset(name="Creative", sampling=SamplingParams(temperature=1.1, top_p=1.0, min_p=0.05, max_tokens=1024)),
)
_BUILT_IN_NAMES: Final = frozenset(preset.name for preset in BUILT_IN_PRESETS)


def is_built_in(name: str) -> bool:
    return name in _BUILT_IN_NAMES


class PresetStore:
    """Presets in `folder`. Each call opens the file, so that it sees what other windows wrote.

    Each method raises KvscopeError, with a line for the user, if the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PRESETS_FILE

    def load(self) -> list[OptionsPreset]:
        """Return the built-in presets, and then the user's by name. Unreadable ones are skipped."""
        presets = []
        if self._path.exists():
            with self._open("read") as database:
                for (data,) in database.execute("SELECT data FROM presets").fetchall():
                    with suppress(ValueError, msgspec.MsgspecError):  # of a later version; it stays in the file
                        presets.append(msgspec.json.decode(data, type=OptionsPreset))
        return [*BUILT_IN_PRESETS, *sorted(presets, key=lambda preset: preset.name.casefold())]

    def find(self, name: str) -> OptionsPreset | None:
        return next((preset for preset in self.load() if preset.name == name), None)

    def save(self, preset: OptionsPreset) -> None:
        """Add a preset, or replace the user's preset of the same name. Raises BadInput for an unusable name."""
        _check_name(preset.name)
        with self._open("saved") as database:
            _write(database, preset)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a preset. Raises BadInput if the name is unusable or taken."""
        _check_name(new_name)
        preset = self.find(name)
        if preset is None or is_built_in(name) or new_name == name:
            return
        if self.find(new_name) is not None:
            raise BadInput(f"there is already a preset {new_name!r}: choose another name")
        with self._open("saved") as database:
            database.execute("DELETE FROM presets WHERE name = ?", (name,))
            _write(database, msgspec.structs.replace(preset, name=new_name))
            database.execute("UPDATE default_preset SET name = ? WHERE name = ?", (new_name, name))

    def delete(self, name: str) -> None:
        with self._open("deleted") as database:
            database.execute("DELETE FROM presets WHERE name = ?", (name,))
            database.execute("DELETE FROM default_preset WHERE name = ?", (name,))

    @property
    def default_name(self) -> str:
        """Name of the preset for new conversations, or ""."""
        if not self._path.exists():
            return ""
        with self._open("read") as database:
            row = database.execute("SELECT name FROM default_preset").fetchone()
        return row[0] if row else ""

    def set_default(self, name: str) -> None:
        """Set the preset for new conversations; "" for none."""
        with self._open("saved") as database:
            database.execute("DELETE FROM default_preset")
            if name:
                database.execute("INSERT INTO default_preset VALUES (1, ?)", (name,))

    @contextmanager
    def _open(self, participle: str) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction. An error says that the presets were not `participle`."""
        try:
            with closing(open_sqlite(self._path, _SCHEMA, [])) as database:
                database.execute("BEGIN IMMEDIATE" if participle != "read" else "BEGIN")
                yield database
                database.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise KvscopeError(f"the presets were not {participle}: {reason}") from error


def _write(database: sqlite3.Connection, preset: OptionsPreset) -> None:
    database.execute("INSERT OR REPLACE INTO presets VALUES (?, ?)", (preset.name, msgspec.json.encode(preset)))


def _check_name(name: str) -> None:
    if is_built_in(name):
        raise BadInput(f"{name!r} is a preset of kvscope: choose another name")
    if not name.strip() or len(name) > MAX_PRESET_NAME:
        raise BadInput(f"a preset's name has 1 to {MAX_PRESET_NAME} characters, not {len(name.strip())}")
