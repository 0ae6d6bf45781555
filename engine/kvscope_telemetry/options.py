"""Options as fields of a frozen dataclass. Each field defines the flag, the accepted values and the help text.

The command line, the validation of a configuration, and programs that pass options on are derived from the fields.
Independent of any particular option.
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
"""Minimum number of bytes without a unit. Smaller numbers are refused: `--gpu-memory 24` is probably meant as 24 GiB.
"""
_OPTION: Final = "option"
_MAX_BYTES: Final = 1 << 50

T = TypeVar("T")


class Kind(Protocol):
    """Type and bounds of an option's values."""

    @property
    def accepted(self) -> str:
        """Description of the accepted values, to complete "... is not accepted: must be "."""
        ...

    def read(self, text: str) -> object:
        """Parse a command-line text. Raises ValueError if it is not of this kind."""
        ...

    def accepts(self, value: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Text:
    accepted: str

    def read(self, text: str) -> str:
        return text

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few fixed texts. `aliases` maps the names that other programs use for a text to that text."""

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
        return f"a number of GiB from 0 to {self.high}"

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
        return Whole(self.low, _MAX_BYTES).accepts(value)


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
    """A flag with two forms, `--x` and `--no-x`. Without either, the program's default applies."""


@dataclass(frozen=True, slots=True)
class Json:
    """JSON object parsed by `parse`, which raises BadInput with the flag and the field."""

    parse: Callable[[str], object]
    accepted: ClassVar[str] = "a JSON object"

    def read(self, text: str) -> object:
        return self.parse(text)

    def accepts(self, value: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Several:
    """A repeatable option. Each value is parsed by `parse`, which raises BadInput with the flag."""

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
    """Shorter help text, for a program with many options. Equal to `help` if no shorter text was given."""

    def argument(self, text: str) -> object:
        """Parse a command-line text, for argparse. Raises ArgumentTypeError."""
        try:
            value = self.kind.read(text)
        except BadInput as error:  # names the flag, as argparse does
            raise argparse.ArgumentTypeError(str(error).removeprefix(self.flags[0]).lstrip(": ")) from None
        except (ValueError, OverflowError):
            value = None
        if not self.kind.accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: must be {self.kind.accepted}")
        return value

    def add_to(self, group: argparse._ArgumentGroup, name: str) -> None:
        """Add the option to the parser of a program that uses its value, as `name` in the namespace."""
        match self.kind:
            case OnOff():
                settings: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            case Switch():
                settings = {"action": "store_true"}
            case OneOf(words=words):
                settings = {"type": self.argument, "choices": words}
            case Several():
                settings = {"type": self.argument, "metavar": self.metavar, "nargs": "+"}
            case _:
                settings = {"type": self.argument, "metavar": self.metavar}
        group.add_argument(*self.flags, dest=name, default=self.default, help=self.help, **settings)

    def add_passed_on(self, group: argparse._ArgumentGroup, name: str) -> None:
        """Add the option to the parser of a program that passes it on (`command_line_arguments`). The value is
        checked but remains text.
        """
        match self.kind:
            case OnOff():
                settings: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            case Switch():
                settings = {"action": "store_true", "default": None}
            case Several():
                settings = {"type": self._checked, "metavar": self.metavar, "nargs": "+"}
            case _:
                settings = {"type": self._checked, "metavar": self.metavar}
        group.add_argument(*self.flags, dest=name, help=self.brief, **settings)

    def command_line_arguments(self, value: str | bool | list[str] | None) -> list[str]:
        """Return the command-line arguments that pass on a value read by `add_passed_on`."""
        flag = self.flags[0]
        if value is None:
            return []
        if isinstance(value, list):
            return [flag, *value]
        if isinstance(value, bool):
            return [flag if value else "--no-" + flag.removeprefix("--")]
        return [f"{flag}={value}"]

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
    """Return a dataclass's options by field name, in the order of the fields."""
    options = {}
    for config_field in fields(config):
        metadata = dict(config_field.metadata[_OPTION])
        first, *others = metadata.pop("flags")
        flags = (first or "--" + config_field.name.replace("_", "-"), *others)
        options[config_field.name] = Option(flags=flags, default=config_field.default, **metadata)
    return options


def check_options(config: Any) -> None:
    """Raise BadInput if a value in `config` is not accepted by its option. None is accepted for an option whose
    default is None.
    """
    for name, option in options_of(type(config)).items():
        value = getattr(config, name)
        if not (value is None and option.default is None) and not option.kind.accepts(value):
            raise BadInput(f"{name}={value!r} is not accepted: must be {option.kind.accepted}")


def read_size(text: str) -> int:
    """Return the number of bytes of a text such as `512MiB`, `1.5GB`, `4G` (binary) or a plain number. Raises
    ValueError.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    num_bytes = float(match[1]) * unit if match and unit else 0.0
    min_bytes = MIN_PLAIN_BYTES if match and not match[2] else 1
    if not min_bytes <= num_bytes < math.inf:
        raise ValueError(f"must be {Size.accepted}")
    return int(num_bytes)
