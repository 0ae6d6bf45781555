"""How much clients may ask of one engine, each and together. Beyond it a command is refused, and said to be."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bound:
    """How many of something, and how many bytes of it."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What the engine's process holds for its clients. Bytes are those of `command_bytes`."""

    client_commands: Bound = Bound(4_096, 32 * MIB)
    """Commands of one client that wait to be served."""
    all_commands: Bound = Bound(16_384, 128 * MIB)
    client_prompts: Bound = Bound(2_048, 64 * MIB)
    """Submissions of one client whose prompts are being made into tokens."""
    all_prompts: Bound = Bound(8_192, 256 * MIB)
    client_requests: Bound = Bound(8_192, 256 * MIB)
    """Completions of one client in the queue or running, and their prompts' tokens."""
    all_requests: Bound = Bound(32_768, 1024 * MIB)
    client_snapshots: int = 64
    """Snapshots one client may wait for."""
