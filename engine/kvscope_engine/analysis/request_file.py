"""Reads a request file record by record: JSON lines, or one JSON array.

Of JSON lines, one line at a time is in memory. A record that cannot be read is skipped and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from kvscope_engine.analysis.prompt_formats import FilePrompt, prompts_of
from kvscope_telemetry.errors import BadInput

MAX_LINE_BYTES: Final = 64 << 20
MAX_ARRAY_BYTES: Final = 2 << 30
"""Largest accepted file with a JSON array, all of which is read into memory."""
MAX_SHOWN_PROBLEMS: Final = 3

PromptKey = tuple[int, int]
"""Number of the record in the file, from 1, and index of the prompt in it."""


@dataclass(slots=True)
class RequestFile:
    """A request file. `problems` describes the first records that were skipped by the last reading."""

    path: Path
    num_skipped: int = 0
    problems: list[str] = field(default_factory=list)
    is_array: bool = False
    """Whether the last reading found a JSON array."""

    @property
    def record_name(self) -> str:
        """`line`, or `record` in a JSON array: what the number of a `PromptKey` counts."""
        return "record" if self.is_array else "line"

    def prompts(self, report: Callable[[float], object] = lambda _: None) -> Iterator[tuple[PromptKey, FilePrompt]]:
        """Yield all prompts in the order of the file. `report` is called with the share of the file that was read.

        Raises BadInput for a file that cannot be read.
        """
        self.num_skipped, self.problems = 0, []
        for number, data in self._records(report):
            try:
                prompts = prompts_of(_decoded(data))
            except BadInput as error:
                self.skip(number, str(error))
                continue
            except RecursionError:
                self.skip(number, "arrays or objects are nested too deeply")
                continue
            for index, prompt in enumerate(prompts):
                yield (number, index), prompt

    def skip(self, number: int, reason: str) -> None:
        """Count a record that is left out."""
        self.num_skipped += 1
        if len(self.problems) < MAX_SHOWN_PROBLEMS:
            self.problems.append(f"{self.record_name} {number}: {reason}")

    def _records(self, report: Callable[[float], object]) -> Iterator[tuple[int, bytes | msgspec.Raw | None]]:
        """Yield (number, JSON); None for a line that is too long."""
        try:
            with self.path.open("rb") as file:
                num_bytes = max(1, os.fstat(file.fileno()).st_size)
                self.is_array = _begins_array(file)
                if self.is_array:
                    yield from self._array(file, num_bytes)
                    return
                for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                    is_whole = len(line) <= MAX_LINE_BYTES
                    while line and not line.endswith(b"\n") and len(line) > MAX_LINE_BYTES:
                        line = file.readline(MAX_LINE_BYTES + 1)
                    report(file.tell() / num_bytes)
                    if not is_whole:
                        yield number, None
                    elif line.strip():
                        yield number, line
        except OSError as error:
            raise BadInput(f"request file {str(self.path)!r} cannot be read: {error.strerror}") from None

    def _array(self, file: BinaryIO, num_bytes: int) -> Iterator[tuple[int, msgspec.Raw]]:
        if num_bytes > MAX_ARRAY_BYTES:
            raise BadInput(
                f"request file {str(self.path)!r} has {num_bytes} bytes: a JSON array is accepted up to"
                f" {MAX_ARRAY_BYTES}, JSON lines of any size"
            )
        try:
            records = msgspec.json.decode(file.read(), type=list[msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"request file {str(self.path)!r} cannot be read: {error}") from None
        yield from enumerate(records, 1)


def _begins_array(file: BinaryIO) -> bool:
    begins = file.read(64).lstrip().startswith(b"[")
    file.seek(0)
    return begins


def _decoded(data: bytes | msgspec.Raw | None) -> object:
    if data is None:
        raise BadInput(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        record: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"no JSON: {error}") from None
    return record
