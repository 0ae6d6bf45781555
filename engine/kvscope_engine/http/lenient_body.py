"""Decodes request bodies with fields that this API does not have, or numbers in another form than JSON integers.

Clients send fields that were made for other servers, such as `cache_control` in a content part. A field that no struct
has is ignored, and its name is printed once to standard error, so that an operator can find out why an option has no
effect. Fields that would change the answer are in the structs and refused by name: see `request_bodies.py`.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

MAX_REPORTED: Final = 200
"""Maximum number of field names that are reported, so that a client cannot fill the log with random names."""
_Body = TypeVar("_Body")
_reported: set[str] = set()
_lock: Final = threading.Lock()


def lenient_body(data: bytes, kind: type[_Body]) -> _Body:
    """Decode JSON as the struct `kind`.

    Unknown fields are left out, and "5" and 5.0 are accepted for the integer 5. Raises msgspec.DecodeError or
    ValidationError.
    """
    value = _without_unknown(msgspec.json.decode(data), _type_info(kind))
    return msgspec.convert(value, kind, strict=False)


_type_info: Final[Any] = cache(inspect.type_info)


def _without_unknown(value: Any, kind: inspect.Type) -> Any:
    """Drop the fields that the struct does not have from a decoded JSON value."""
    if isinstance(kind, inspect.UnionType):
        kind = next((one for one in kind.types if isinstance(one, _KIND_BY_CLASS.get(type(value), ()))), kind)
    if isinstance(kind, inspect.Metadata):
        return _without_unknown(value, kind.type)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in kind.fields}
        for name in value.keys() - fields.keys():
            _report(kind.cls.__name__, name)
        return {name: _without_unknown(part, fields[name]) for name, part in value.items() if name in fields}
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        return [_without_unknown(part, kind.item_type) for part in value]
    return value


_KIND_BY_CLASS: Final[dict[type, type]] = {dict: inspect.StructType, list: inspect.ListType}


def _report(struct_name: str, name: str) -> None:
    where = struct_name.removesuffix("Body")
    with _lock:
        if name in _reported or len(_reported) >= MAX_REPORTED:
            return
        _reported.add(name)
    print(f"http: ignoring the unknown field {name!r:.60} of {where} (reported once)", file=sys.stderr, flush=True)
