"""Structured output: the required format of a completion's text.

A format is a JSON schema, any JSON object, a regex, a grammar, a choice, or a structural tag, which combines these with
fixed text. It is validated on construction, except for errors that depend on the vocabulary, which the grammar compiler
reports.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import msgspec

from kvscope_telemetry.errors import BadInput

MAX_STRUCTURED_CHARACTERS: Final = 256 << 10
MAX_CHOICES: Final = 1024

StructuredKind: TypeAlias = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
KINDS: Final = get_args(StructuredKind)


class Structured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The required format of a text.

    Raises BadInput (msgspec.ValidationError when decoded from the wire) if `text` does not fit `kind`.
    """

    kind: StructuredKind
    text: str = ""
    """A JSON schema; a regex that matches the whole text; a GBNF grammar with the rule `root`; a JSON array of strings
    to choose from; XGrammar's structural tag as JSON. Empty for "json_object".
    """

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"kind={self.kind!r:.40} of structured output is not accepted: {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise BadInput(f"text={self.text!r:.40} of {self.kind} is not accepted: must be a string")
        if len(self.text) > MAX_STRUCTURED_CHARACTERS:
            size = len(self.text)
            raise BadInput(f"{self.kind} has {size} characters: at most {MAX_STRUCTURED_CHARACTERS} are accepted")
        if self.kind == "json_object":
            if self.text:
                raise BadInput(f"json_object takes no text, not {self.text!r:.40}: json_schema takes one")
        elif not self.text.strip():
            raise BadInput(f"{self.kind} is empty: it has to say what text is accepted")
        if self.kind == "choice":
            self.choices()

    def choices(self) -> tuple[str, ...]:
        """Return the strings of a "choice". Raises BadInput if the text is not a JSON array of non-empty strings."""
        try:
            found = msgspec.json.decode(self.text, type=tuple[str, ...])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadInput(
                f"choice={self.text!r:.60} is not accepted: must be a JSON array of strings ({error})"
            ) from None
        if not 0 < len(found) <= MAX_CHOICES:
            raise BadInput(f"choice has {len(found)} strings: 1 to {MAX_CHOICES} are accepted")
        if not all(found):
            raise BadInput("choice has an empty string: at least one character is accepted")
        return found
