"""Identifies the LoRA adapter that a request is computed with. A value: knows neither weights nor their location."""

from __future__ import annotations

from typing import Final

import msgspec

NO_UPDATING: Final = (
    "adapters are loaded and unloaded only at an engine that was started with --allow-runtime-lora-updating"
)


class Adapter(msgspec.Struct, frozen=True, gc=False):
    """A loaded adapter. KV that was computed with one cannot be used with another."""

    name: str
    key: bytes
    """32 bytes derived from name, scale and weights: another adapter loaded under the same name has another key."""
