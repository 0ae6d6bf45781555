"""Options as fields of a frozen dataclass: each field defines how it is given, checked and explained.

The command line, the validation of a configuration, and programs that pass options on are derived from the fields. This
module knows no particular option.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Protocol, TypeVar

from kvscope_telemetry.errors import BadInput

SIZE_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
MIN_PLAIN_BYTES: Final = 4096
"""Smaller numbers without a unit are refused: a user who types `--gpu-memory 24` means 24 GiB."""
_OPTION: Final = "option"
_MOST_BYTES: Final = 1 << 50

T = TypeVar("T")


class Kind(Protocol):
    """Type and bounds of an option's values."""

    @property
    def accepted(self) -> str:
        """Text that completes "... is not accepted: "."""
        ...

    def read(self, text: str) -> object:
        """Parse a text. Raises ValueError if it is not of this kind."""
        ...

    def accepts(self, value: Any) -> bool:
        """Whether `value` is of this kind and within its bounds."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    accepted: str

    def read(self, text: str) -> str:
        return text

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words. `aliases` maps other programs' words to them."""

    words: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def accepted(self) -> str:
        return f"one of {', '.join(self.words)}"

    def read(self, text: str) -> str:
        return dict(self.aliases).get(text, text)

    def accepts(self, value: Any) -> bool:
        return value in self.words


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer from `low` to `high`, both inclusive."""

    low: int
    high: int

    @property
    def accepted(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def read(self, text: str) -> int:
        return int(text)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class PositiveShare:
    """A fraction above 0 and at most 1."""

    accepted: ClassVar[str] = "a number above 0 and at most 1"

    def read(self, text: str) -> float:
        return float(text)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= 1.0


@dataclass(frozen=True, slots=True)
class Gib:
    """A number of GiB, possibly fractional."""

    high: int

    @property
    def accepted(self) -> str:
        return f"GiB, a number from 0 to {self.high}"

    def read(self, text: str) -> float:
        return float(text)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= self.high


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, given as a size such as `512MiB`."""

    low: int = 1
    accepted: ClassVar[str] = f"a size such as 512MiB or 2GB, or bytes from {MIN_PLAIN_BYTES}"

    def read(self, text: str) -> int:
        return read_size(text)

    def accepts(self, value: Any) -> bool:
        return Whole(self.low, _MOST_BYTES).accepts(value)


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag without a value, off by default."""

    accepted: ClassVar[str] = "True or False"

    def read(self, text: str) -> bool:
        raise ValueError("no value is expected")

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class OnOff(Switch):
    """On, off, or the program's default: `--x` and `--no-x`."""


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON object parsed by `parse`, which raises BadInput with the flag and the field."""

    parse: Callable[[str], object]
    accepted: ClassVar[str] = "a JSON object"

    def read(self, text: str) -> object:
        return self.parse(text)

    def accepts(self, value: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Several:
    """Any number of values, each parsed by `parse`, which raises BadInput with the flag."""

    parse: Callable[[str], object]
    accepted: str

    def read(self, text: str) -> object:
        return self.parse(text)

    def accepts(self, value: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    flags: tuple[str, ...]
    """The option's flag, followed by its aliases."""
    default: object
    kind: Kind
    group: str
    metavar: str
    help: str
    brief: str
    """Shorter help for a program in which this is one of many options; equal to `help` if there is none."""

    def argument(self, text: str) -> object:
        """Parse a command-line text, for argparse. Raises ArgumentTypeError."""
        try:
            value = self.kind.read(text)
        except BadInput as error:  # names the flag, as argparse does
            raise argparse.ArgumentTypeError(str(error).removeprefix(self.flags[0]).lstrip(": ")) from None
        except (ValueError, OverflowError):
            value = None
        if not self.kind.accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: {self.kind.accepted}")
        return value

    def add_to(self, group: argparse._ArgumentGroup, name: str) -> None:
        """Add the option to the parser of a program that uses the value, as `name` in the namespace."""
        match self.kind:
            case OnOff():
                given: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            case Switch():
                given = {"action": "store_true"}
            case OneOf(words=words):
                given = {"type": self.argument, "choices": words}
            case Several():
                given = {"type": self.argument, "metavar": self.metavar, "nargs": "+"}
            case _:
                given = {"type": self.argument, "metavar": self.metavar}
        group.add_argument(*self.flags, dest=name, default=self.default, help=self.help, **given)

    def add_passed_on(self, group: argparse._ArgumentGroup, name: str) -> None:
        """Add the option to the parser of a program that passes it on (`words`): the value is checked and kept as
        text.
        """
        match self.kind:
            case OnOff():
                given: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            case Switch():
                given = {"action": "store_true", "default": None}
            case Several():
                given = {"type": self._checked, "metavar": self.metavar, "nargs": "+"}
            case _:
                given = {"type": self._checked, "metavar": self.metavar}
        group.add_argument(*self.flags, dest=name, help=self.brief, **given)

    def words(self, given: str | bool | list[str] | None) -> list[str]:
        """Return the command-line arguments that pass on a value read by `add_passed_on`."""
        flag = self.flags[0]
        if given is None:
            return []
        if isinstance(given, list):
            return [flag, *given]
        if isinstance(given, bool):
            return [flag if given else "--no-" + flag.removeprefix("--")]
        return [f"{flag}={given}"]

    def _checked(self, text: str) -> str:
        self.argument(text)
        return text


def option(
    default: T,
    kind: Kind,
    *,
    group: str,
    help: str,
    brief: str = "",
    metavar: str = "",
    flag: str = "",
    short: tuple[str, ...] = (),
) -> T:
    """Return a dataclass field that is an option. `flag` defaults to the field's name."""
    about = {
        "flags": (flag, *short),
        "kind": kind,
        "group": group,
        "metavar": metavar,
        "help": help,
        "brief": brief or help,
    }
    return field(default=default, metadata={_OPTION: about})


def options_of(config: type[Any]) -> dict[str, Option]:
    """Return a dataclass's options by field name, in order."""
    found = {}
    for each in fields(config):
        about = dict(each.metadata[_OPTION])
        first, *others = about.pop("flags")
        flags = (first or "--" + each.name.replace("_", "-"), *others)
        found[each.name] = Option(flags=flags, default=each.default, **about)
    return found


def check_options(config: Any) -> None:
    """Raise BadInput if an option does not accept its value in `config`. None is accepted if it is the default."""
    for name, each in options_of(type(config)).items():
        value = getattr(config, name)
        if not (value is None and each.default is None) and not each.kind.accepts(value):
            raise BadInput(f"{name}={value!r} is not accepted: {each.kind.accepted}")


def read_size(text: str) -> int:
    """Return the number of bytes of `512MiB`, `1.5GB`, `4G` (binary) or a plain number. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    num_bytes = float(match[1]) * unit if match and unit else 0.0
    at_least = MIN_PLAIN_BYTES if match and not match[2] else 1
    if not at_least <= num_bytes < math.inf:
        raise ValueError(Size.accepted)
    return int(num_bytes)
