"""What form a completion's text has to have: a JSON schema, any JSON object, a regex, a grammar, one of some choices,
or pieces of these between fixed texts.

Checked where it is made, as far as that needs no vocabulary; whoever compiles it finds the rest.
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
    """The form of a text. Raises BadInput (msgspec.ValidationError when decoded) for what cannot be one."""

    kind: StructuredKind
    text: str = ""
    """A schema as JSON; a regex that the whole text matches; a grammar in GBNF, whose rule `root` it is; a JSON
    array of strings, one of which it is; XGrammar's structural tag as JSON. Empty for "json_object"."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"kind={self.kind!r:.40} of structured output is not accepted: {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise BadInput(f"text={self.text!r:.40} of {self.kind} is not accepted: a string")
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
        """Of a "choice". Raises BadInput when the text is no array of them."""
        try:
            found = msgspec.json.decode(self.text, type=tuple[str, ...])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadInput(f"choice={self.text!r:.60} is not accepted: a JSON array of strings ({error})") from None
        if not 0 < len(found) <= MAX_CHOICES:
            raise BadInput(f"choice has {len(found)} strings: 1 to {MAX_CHOICES} are accepted")
        if not all(found):
            raise BadInput("choice has an empty string: at least one character is accepted")
        return found
