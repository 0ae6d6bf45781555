"""Recognizes vLLM and SGLang in a command line: which Python runs them, and how many data-parallel ranks they start.

Used by `kvscope inside`. A command that is not recognized, such as a shell script that starts a server, is run as it
is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.external_engines import ENGINES
from kvscope_telemetry.errors import BadInput

_PYTHON: Final = re.compile(r"python[\d.]*")
_EXEC_LINE: Final = re.compile(r"""'''exec' (?:"([^"]+)"|'([^']+)'|([^"' ]+))""")
"""Second line of a script whose first line names a shell, which pip writes if Python's path is long or has spaces."""
_PROBE: Final = (
    "import importlib.metadata as m, importlib.util as u, json, sys\n"
    "plugins = m.entry_points(group=sys.argv[2], name='kvscope')\n"
    "print(json.dumps([u.find_spec(sys.argv[1]) is not None, bool(plugins)]))"
)
_PROBE_S: Final = 60.0
_MAX_RANKS: Final = 4096


@dataclass(frozen=True, slots=True)
class HostCommand:
    """A command line whose program was found."""

    program: str
    """Path of the program."""
    arguments: tuple[str, ...]
    """All words of the command line, beginning with the program as the user wrote it."""
    engine: ExternalEngine | None
    """The engine that the command starts; None if it was not recognized."""
    python: str
    """Path of the Python that runs the engine; empty if unknown."""

    @property
    def ranks(self) -> range:
        """The data-parallel ranks that the command starts, as far as its options say."""
        if self.engine is None or self.engine.plugin is None:
            return range(1)
        plugin = self.engine.plugin
        only = self._number(plugin.only_rank_options, -1)
        if only >= 0:
            return range(only, only + 1)
        first = max(self._number(plugin.first_rank_options, 0), 0)
        return range(first, first + min(max(self._number(plugin.rank_options, 1), 1), _MAX_RANKS))

    def require_plugin(self, environment: Mapping[str, str]) -> None:
        """Raise BadInput if the engine or kvscope's plugin is not installed where the command would run it.

        Does nothing if the engine or its Python was not recognized, or that Python does not answer.
        """
        if self.engine is None or self.engine.plugin is None or not self.python:
            return
        found = _probe(self.python, (self.engine.scheme, self.engine.plugin.entry_point_group), environment)
        if found is None:
            return
        has_engine, has_plugin = found
        if not has_engine:
            raise BadInput(f"{self.engine.name} is not installed for {self.python}: name the Python that has it")
        if not has_plugin:
            raise BadInput(
                f"kvscope is not installed beside {self.engine.name}, so it would not load the plugin:"
                f" run `{self.python} -m pip install kvscope` first"
            )

    def _number(self, options: Sequence[str], default: int) -> int:
        """Return the value of the first of the `options` that is given with a number."""
        words = self.arguments[1:]
        for option in options:
            for index, word in enumerate(words):
                name, separator, value = word.partition("=")
                if name.replace("_", "-") == option:
                    value = value if separator else next(iter(words[index + 1 : index + 2]), "")
                    if value.isascii() and value.isdigit() and len(value) < 6:
                        return int(value)
        return default


def find_command(words: Sequence[str], environment: Mapping[str, str]) -> HostCommand:
    """Return the command line `words`. Raises BadInput if its program does not exist.

    The program is searched in PATH, then beside this Python, for an environment that is not activated.
    """
    beside = os.path.dirname(sys.executable)
    program = shutil.which(words[0], path=environment.get("PATH")) or shutil.which(words[0], path=beside)
    if program is None:
        hint = "" if _engine_named(words[0]) is None else ": install it, or activate the environment that has it"
        raise BadInput(f"{words[0]!r} was not found{hint or ': must be a program in PATH'}")
    name = os.path.basename(words[0])
    if _PYTHON.fullmatch(name):
        module = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"), "")
        return HostCommand(program, tuple(words), _engine_named(module.partition(".")[0]), program)
    engine = _engine_named(name)
    return HostCommand(program, tuple(words), engine, "" if engine is None else _python_of_script(program, environment))


def _engine_named(module: str) -> ExternalEngine | None:
    return next((engine for engine in ENGINES if engine.plugin is not None and engine.scheme == module), None)


def _python_of_script(script: str, environment: Mapping[str, str]) -> str:
    """Return the path of the Python in the first lines of a script; empty if there is none."""
    try:
        with Path(script).open("rb") as file:
            first, second = (file.readline(4096).decode(errors="replace").strip() for _ in range(2))
    except OSError:
        return ""
    if not first.startswith("#!"):
        return ""
    words = first[2:].split()
    if len(words) > 1 and os.path.basename(words[0]) == "env":
        return shutil.which(words[-1], path=environment.get("PATH")) or ""
    if words and _PYTHON.fullmatch(os.path.basename(words[0])):
        return words[0]
    match = _EXEC_LINE.match(second)
    return "" if match is None else next(filter(None, match.groups()))


def _probe(python: str, names: tuple[str, str], environment: Mapping[str, str]) -> tuple[bool, bool] | None:
    """Return whether `python` has the engine and the plugin, given the names of the engine's package and of the group
    of entry points; None if it gives no answer.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *names],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=True,
        )
        has_engine, has_plugin = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return bool(has_engine), bool(has_plugin)
