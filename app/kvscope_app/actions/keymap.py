"""Shortcuts of actions and conflicts between them. Imports no Qt. Keys are portable text (`Ctrl+Shift+P`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

UserShortcuts = Mapping[str, tuple[str, ...]]
"""Keys that the user chose, by action name. Actions that are not in it have their default keys."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    text: str
    own_keys: tuple[str, ...]
    focus_dock: str = ""
    """Name of the dock that must have the keyboard focus for the shortcuts to work, or "" for the whole window."""


def keys_of(name: str, own_keys: tuple[str, ...], shortcuts: UserShortcuts) -> tuple[str, ...]:
    return shortcuts.get(name, own_keys)


def conflicts(
    command: Command, keys: Iterable[str], commands: Iterable[Command], shortcuts: UserShortcuts
) -> list[Command]:
    """Return the other commands that use one of `keys` and can be active at the same time as `command`.

    If two commands that share a key are active, Qt triggers neither of them.
    """
    folded_keys = {key.casefold() for key in keys}
    return [
        other
        for other in commands
        if other.name != command.name
        and _overlap(command, other)
        and folded_keys & {key.casefold() for key in keys_of(other.name, other.own_keys, shortcuts)}
    ]


def with_keys(
    command: Command, keys: tuple[str, ...], commands: Iterable[Command], shortcuts: UserShortcuts
) -> UserShortcuts:
    """Return a copy of `shortcuts` in which `keys` are assigned to `command` and removed from conflicting
    commands.
    """
    commands = list(commands)
    result = dict(shortcuts)
    for rival in conflicts(command, keys, commands, shortcuts):
        assigned = {key.casefold() for key in keys}
        kept_keys = tuple(k for k in keys_of(rival.name, rival.own_keys, shortcuts) if k.casefold() not in assigned)
        _set_keys(result, rival, kept_keys)
    _set_keys(result, command, keys)
    return result


def _set_keys(shortcuts: dict[str, tuple[str, ...]], command: Command, keys: tuple[str, ...]) -> None:
    if keys == command.own_keys:
        shortcuts.pop(command.name, None)
    else:
        shortcuts[command.name] = keys


def _overlap(first: Command, second: Command) -> bool:
    """Whether there is a dock whose keyboard focus makes the shortcuts of both commands active."""
    return not first.focus_dock or not second.focus_dock or first.focus_dock == second.focus_dock
