"""Metadata that all tables share."""

from __future__ import annotations

from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording


def about(recording: Recording, span: Span) -> dict[str, str]:
    """Return the model, device, pool size and time range of an export as texts by name. `from_s` and `until_s` count
    from `recording_start_ns`.
    """
    hello = recording.info.hello
    return {
        "model": hello.model.name,
        "device": " ".join(filter(None, (hello.device.kind, hello.device.name))),
        "num_blocks": str(hello.cache.num_blocks),
        "block_size_tokens": str(hello.cache.block_size),
        "recording_start_ns": str(span.start_ns),
        "from_s": f"{span.from_s:.9f}",
        "until_s": f"{span.until_s:.9f}",
    }
