"""Shortcuts of actions and conflicts between them. Knows no widgets. Keys are portable text (`Ctrl+Shift+P`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Chosen = Mapping[str, tuple[str, ...]]
"""Keys that the user chose, by action name. Other actions have their default keys."""


@dataclass(frozen=True, slots=True)
class Command:
    """Properties of an action that the keymap needs."""

    name: str
    text: str
    own_keys: tuple[str, ...]
    within: str = ""
    """Dock that must have the focus for its keys; empty: any focus in the window."""


def keys_of(name: str, own_keys: tuple[str, ...], chosen: Chosen) -> tuple[str, ...]:
    return chosen.get(name, own_keys)


def conflicts(command: Command, keys: Iterable[str], commands: Iterable[Command], chosen: Chosen) -> list[Command]:
    """Return the other commands for which one of `keys` would be ambiguous, so that pressing it would trigger
    neither.
    """
    wanted = {key.casefold() for key in keys}
    return [
        other
        for other in commands
        if other.name != command.name
        and _overlap(command, other)
        and wanted & {key.casefold() for key in keys_of(other.name, other.own_keys, chosen)}
    ]


def with_keys(command: Command, keys: tuple[str, ...], commands: Iterable[Command], chosen: Chosen) -> Chosen:
    """Return the choices after assigning `keys` to `command` and removing them from conflicting commands."""
    commands = list(commands)
    result = dict(chosen)
    for rival in conflicts(command, keys, commands, chosen):
        taken = {key.casefold() for key in keys}
        left = tuple(k for k in keys_of(rival.name, rival.own_keys, chosen) if k.casefold() not in taken)
        _choose(result, rival, left)
    _choose(result, command, keys)
    return result


def _choose(chosen: dict[str, tuple[str, ...]], command: Command, keys: tuple[str, ...]) -> None:
    if keys == command.own_keys:
        chosen.pop(command.name, None)
    else:
        chosen[command.name] = keys


def _overlap(first: Command, second: Command) -> bool:
    """Whether there is a focus in which the keys of both apply."""
    return not first.within or not second.within or first.within == second.within
