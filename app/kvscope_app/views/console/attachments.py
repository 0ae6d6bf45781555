"""Text files attached to a prompt: how they are read, checked and sent. Imports no Qt."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvscope_app.ui.number_text import num_bytes
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.whole_file import require_regular

MAX_ATTACHMENT_BYTES: Final = 512 << 10
MAX_ATTACHMENTS: Final = 16
_BACKTICKS: Final = re.compile(r"`{3,}")
_UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """Text file attached to a prompt, with its contents at the time when it was attached."""

    name: str
    text: str

    @property
    def fenced(self) -> str:
        """The file as it is sent: its name, and its text between fences that are longer than any in the text."""
        fence = "`" * max([3, *(len(found) + 1 for found in _BACKTICKS.findall(self.text))])
        return f"{self.name}:\n{fence}\n{self.text.rstrip()}\n{fence}"


def with_attachments(prompt: str, attachments: Sequence[Attachment]) -> str:
    """Return the text that is sent: the attached files, then the prompt."""
    return "\n\n".join([*(attachment.fenced for attachment in attachments), prompt])


def read_attachment(path: Path) -> Attachment:
    """Read a text file in UTF-8, or in UTF-16 with a byte order mark.

    Raises BadInput, with one line for the user, if the file cannot be read, is too large, or is not such a text file.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            data = file.read(MAX_ATTACHMENT_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path.name} was not attached: {error.strerror or error}") from error
    if len(data) > MAX_ATTACHMENT_BYTES:
        raise BadInput(
            f"{path.name} was not attached: it is larger than {num_bytes(MAX_ATTACHMENT_BYTES)}, the maximum for a file"
        )
    encoding = "utf-16" if data.startswith(_UTF16_MARKS) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name} was not attached: only text in UTF-8, or UTF-16 with BOM, is accepted") from error
    if "\0" in text:
        raise BadInput(f"{path.name} was not attached: it is a binary file, and only text files are accepted")
    if not text.strip():
        raise BadInput(f"{path.name} was not attached: it is empty")
    return Attachment(name=" ".join(path.name.split()), text=text.replace("\r\n", "\n"))
