"""Parses command-line options with a JSON object as value into a struct, with one-line errors about a single field.

Owns the error texts; the struct defines the fields and their bounds.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvscope_telemetry.errors import BadInput

StructT = TypeVar("StructT", bound=msgspec.Struct)


def read_json_option(option: str, text: str, kind: type[StructT]) -> StructT:
    """Parse `text` as an object of type `kind`. Raises BadInput with a one-line message that names `option`."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadInput(f"{option} {text[:200]!r} is not accepted: a JSON object is expected ({error})") from None
    infos = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in fields:
        if name not in infos:
            raise BadInput(f"{option}: field {name[:80]!r} is not known: one of {', '.join(infos)}")
    for name, value in fields.items():
        try:
            msgspec.convert(value, infos[name].type)
        except (msgspec.ValidationError, ValueError) as error:
            reason = str(error).split(" - at ")[0]
            raise BadInput(f"{option}: {name}={str(value)[:80]!r} is not accepted: {reason}") from None
    for name, info in infos.items():
        if info.required and name not in fields:
            raise BadInput(f"{option}: field {name!r} is missing")
    return msgspec.convert(fields, kind)
