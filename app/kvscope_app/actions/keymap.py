"""Which keys an action has, and who else has them. Knows no widgets. Keys are portable text (`Ctrl+Shift+P`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Chosen = Mapping[str, tuple[str, ...]]
"""By name; an action that is not in it has its own keys."""


@dataclass(frozen=True, slots=True)
class Command:
    """An action as the keymap sees it."""

    name: str
    text: str
    own_keys: tuple[str, ...]
    within: str = ""
    """The dock whose focus its keys need; empty: the window's."""


def keys_of(name: str, own_keys: tuple[str, ...], chosen: Chosen) -> tuple[str, ...]:
    """What it has now."""
    return chosen.get(name, own_keys)


def rivals(command: Command, keys: Iterable[str], commands: Iterable[Command], chosen: Chosen) -> list[Command]:
    """Other commands that have one of `keys` where this one would: pressing it would do neither."""
    wanted = {key.casefold() for key in keys}
    return [
        other
        for other in commands
        if other.name != command.name
        and _meet(command, other)
        and wanted & {key.casefold() for key in keys_of(other.name, other.own_keys, chosen)}
    ]


def given(command: Command, keys: tuple[str, ...], commands: Iterable[Command], chosen: Chosen) -> Chosen:
    """The choices when `command` gets `keys`, and whoever had one of them loses it."""
    commands = list(commands)
    result = dict(chosen)
    for rival in rivals(command, keys, commands, chosen):
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


def _meet(first: Command, second: Command) -> bool:
    """Whether both hear a key somewhere."""
    return not first.within or not second.within or first.within == second.within
