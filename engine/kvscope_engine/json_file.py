"""Reads JSON objects from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvscope_telemetry.errors import BadInput

MAX_JSON_BYTES: Final = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Parse the file at `path`.

    Raises BadInput if the file is missing, larger than `MAX_JSON_BYTES`, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadInput(f"{path} is not accepted: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path} is not JSON: {error!s:.120}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} is not accepted: it holds no JSON object")
    return value
