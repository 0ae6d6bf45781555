"""Figures and texts about a map of PyTorch's allocator. Imports no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_app.ui.number_text import count, num_bytes, percent, plural
from kvscope_telemetry.messages.commands import AllocatorMap
from kvscope_telemetry.mirror.allocator_map import AllocatorPool, State, TorchSegment

Row = tuple[str, str, str]
STATE_TEXTS: Final = {
    State.ALLOCATED: "allocated",
    State.PENDING: "freed, waiting for a stream",
    State.CACHED: "cached",
    State.JOINED: "small blocks of several states",
}
POOL_LABELS: Final = {AllocatorPool.SMALL: "small", AllocatorPool.LARGE: "large", AllocatorPool.PRIVATE: "private"}
_COLUMNS: Final = (
    "segment_address",
    "segment_bytes",
    "pool",
    "stream",
    "block_offset",
    "block_bytes",
    "state",
)


def fragmentation(allocator_map: AllocatorMap) -> float | None:
    """Return the share of cached memory outside the largest cached block, 0 to 1, or None if nothing is cached."""
    return (
        1 - allocator_map.largest_cached_bytes / allocator_map.cached_bytes if allocator_map.cached_bytes > 0 else None
    )


def figure_rows(allocator_map: AllocatorMap) -> list[Row]:
    share = fragmentation(allocator_map)
    return [
        ("Segments", count(allocator_map.num_segments), "Device memory segments held by torch"),
        ("Blocks", count(allocator_map.num_blocks), "Subdivisions of segments"),
        ("Held", num_bytes(allocator_map.total_bytes), "All segments together"),
        ("Allocated", num_bytes(allocator_map.allocated_bytes), "In blocks of tensors, rounded up as torch does"),
        ("Pending", num_bytes(allocator_map.pending_bytes), "Freed, waiting for a stream that may still read them"),
        ("Cached", num_bytes(allocator_map.cached_bytes), "Kept for new tensors"),
        (
            "Split",
            num_bytes(allocator_map.split_bytes),
            "Cached, in partly used segments: cannot be returned to the device",
        ),
        (
            "Largest cached",
            num_bytes(allocator_map.largest_cached_bytes),
            "Largest allocation possible without a new segment",
        ),
        (
            "Fragmentation",
            "nothing is cached" if share is None else percent(share),
            "Share of cached memory outside the largest cached block",
        ),
    ]


def omission_text(allocator_map: AllocatorMap, segments: list[TorchSegment]) -> str:
    """Return a text that names the segments and blocks that the drawing omits or merges, or "" if there are none."""
    notes = []
    if len(segments) < allocator_map.num_segments:
        notes.append(f"the largest {count(len(segments))} of {plural(allocator_map.num_segments, 'segment')} are shown")
    num_drawn = sum(len(segment.sizes) for segment in segments)
    if num_drawn < allocator_map.num_blocks and len(segments) == allocator_map.num_segments:
        notes.append(
            f"{count(allocator_map.num_blocks)} blocks are drawn as {count(num_drawn)}:"
            " the smallest neighbours are merged"
        )
    return "; ".join(notes)


def pool_label(pool: int) -> str:
    return next((text for known_pool, text in POOL_LABELS.items() if known_pool == pool), f"pool {pool}")


def state_label(state: int) -> str:
    return next((text for known_state, text in STATE_TEXTS.items() if known_state == state), f"state {state}")


def segment_name(segment: TorchSegment) -> str:
    """Return text such as `2.00 MiB · small`, followed by the stream if it is not the default one."""
    stream = f" · stream {segment.stream:#x}" if segment.stream else ""
    return f"{num_bytes(segment.num_bytes)} · {pool_label(segment.pool)}{stream}"


def segment_tip(segment: TorchSegment) -> str:
    parts = ((state, segment.bytes_of(state)) for state in State)
    parts_text = ", ".join(f"{num_bytes(size)} {state_label(state)}" for state, size in parts if size)
    num_blocks = plural(len(segment.sizes), "block")
    return f"{segment_name(segment)}, at {segment.address:#x}: {num_blocks}; {parts_text or 'not reported'}"


def block_tip(segment: TorchSegment, block: int) -> str:
    size, offset, state = int(segment.sizes[block]), int(segment.offsets[block]), int(segment.states[block])
    return f"{num_bytes(size)} {state_label(state)}, {num_bytes(offset)} into its segment ({segment_name(segment)})"


def as_tsv(segments: list[TorchSegment]) -> str:
    """Return a header line and a tab-separated line per block. Sizes and offsets are in bytes."""
    lines = ["\t".join(_COLUMNS)]
    for segment in segments:
        head = f"{segment.address:#x}\t{segment.num_bytes}\t{pool_label(segment.pool)}\t{segment.stream}"
        blocks = zip(segment.offsets.tolist(), segment.sizes.tolist(), segment.states.tolist(), strict=True)
        lines += [f"{head}\t{offset}\t{size}\t{state_label(state)}" for offset, size, state in blocks]
    return "\n".join(lines) + "\n"
