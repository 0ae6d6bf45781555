"""Which LoRA adapter a request is computed with. A value: knows neither weights nor where they lie."""

from __future__ import annotations

from typing import Final

import msgspec

NO_UPDATING: Final = (
    "adapters are loaded and unloaded only at an engine that was started with --allow-runtime-lora-updating"
)


class Adapter(msgspec.Struct, frozen=True, gc=False):
    """A loaded adapter. What was computed with one is of no use to another."""

    name: str
    key: bytes
    """32 bytes, of its name, scale and weights: another one loaded under the same name has another."""
