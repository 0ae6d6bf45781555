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
    within: str = ""
    """Name of the dock that must have the keyboard focus for the keys; empty: any focus in the window."""


def keys_of(name: str, own_keys: tuple[str, ...], user_shortcuts: UserShortcuts) -> tuple[str, ...]:
    return user_shortcuts.get(name, own_keys)


def conflicts(
    command: Command, keys: Iterable[str], commands: Iterable[Command], user_shortcuts: UserShortcuts
) -> list[Command]:
    """Return the other commands that have one of `keys` for the same focus. Qt would trigger none of them on such a
    key.
    """
    folded_keys = {key.casefold() for key in keys}
    return [
        other
        for other in commands
        if other.name != command.name
        and _overlap(command, other)
        and folded_keys & {key.casefold() for key in keys_of(other.name, other.own_keys, user_shortcuts)}
    ]


def with_keys(
    command: Command, keys: tuple[str, ...], commands: Iterable[Command], user_shortcuts: UserShortcuts
) -> UserShortcuts:
    """Return a copy of `user_shortcuts` in which `keys` are assigned to `command` and removed from conflicting
    commands.
    """
    commands = list(commands)
    result = dict(user_shortcuts)
    for rival in conflicts(command, keys, commands, user_shortcuts):
        assigned = {key.casefold() for key in keys}
        kept_keys = tuple(
            k for k in keys_of(rival.name, rival.own_keys, user_shortcuts) if k.casefold() not in assigned
        )
        _set_keys(result, rival, kept_keys)
    _set_keys(result, command, keys)
    return result


def _set_keys(user_shortcuts: dict[str, tuple[str, ...]], command: Command, keys: tuple[str, ...]) -> None:
    if keys == command.own_keys:
        user_shortcuts.pop(command.name, None)
    else:
        user_shortcuts[command.name] = keys


def _overlap(first: Command, second: Command) -> bool:
    """Whether some keyboard focus makes the keys of both commands apply."""
    return not first.within or not second.within or first.within == second.within
