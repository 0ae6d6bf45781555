"""API keys of external engines' servers that the user asked to save: `~/.config/kvscope/api_keys.toml`, mode 0600.

    [keys]
    "vllm://gpu-box:8000" = "sk-..."

Owns that file. API keys are not written anywhere else: not to settings, recordings or logs.
`ServerAddress.authorization` decides where a key may be sent.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.credentials.key_ring import config_folder
from kvscope_telemetry.credentials.private_files import MAX_BYTES, toml_text, write_config
from kvscope_telemetry.errors import BadInput

_WHAT: Final = "file of API keys"


def api_keys_path() -> Path:
    return config_folder() / "api_keys.toml"


def read_api_keys() -> dict[str, str]:
    """Return the saved API keys by address; empty if there is no file. Raises BadInput for an invalid file."""
    path = api_keys_path()
    try:
        with path.open("rb") as file:
            tables = tomllib.loads(file.read(MAX_BYTES).decode()).get("keys", {})
        return msgspec.convert(tables, dict[str, str])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadInput(f"{_WHAT} {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError):
        raise BadInput(f"{_WHAT} {path} is not accepted: must be a table [keys] of addresses and their keys") from None


def keep_api_key(address: str, key: str) -> None:
    """Save the API key of an address, or delete it if `key` is empty. Raises BadInput if the file cannot be written."""
    before = read_api_keys()
    after = {known: value for known, value in before.items() if known != address} | ({address: key} if key else {})
    if after == before:
        return
    path = api_keys_path()
    lines = [f"{toml_text(known)} = {toml_text(value)}\n" for known, value in after.items()]
    write_config(path, "[keys]\n" + "".join(lines), _WHAT)
