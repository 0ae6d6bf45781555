"""An engine that was found, as `kvscope find` and the attach dialog list it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundEngine:
    address: str
    """Address for `--attach`, or the URL of a server that cannot be watched."""
    engine: str
    """Display name, such as "vLLM"."""
    model: str = ""
    """Name of the model; empty if the engine did not report it."""
    version: str = ""
    note: str = ""
    """What the user should know before attaching, in one sentence without a full stop; empty if nothing."""
    can_attach: bool = True
