"""The LoRA adapter of a request, as a value. It contains neither weights nor their location."""

from __future__ import annotations

from typing import Final

import msgspec

NO_UPDATING: Final = (
    "adapters are loaded and unloaded only at an engine that was started with --allow-runtime-lora-updating"
)


class Adapter(msgspec.Struct, frozen=True, gc=False):
    """A loaded LoRA adapter. KV computed with one adapter cannot be used with another."""

    name: str
    key: bytes
    """32 bytes derived from name, scale and weights. Another adapter loaded under the same name has a different key."""
