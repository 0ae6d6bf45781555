"""What an engine holds of a device beside weights and KV, as far as its allocator tells. No Qt.

On a GPU torch's allocator knows what is in tensors and what it keeps for the next ones; a CPU's tells nothing.
"""

from __future__ import annotations

from kvscope_app.look.number_text import num_bytes
from kvscope_app.views.memory.part import Part
from kvscope_telemetry.messages.telemetry import MemoryBreakdown, RankMemory

Row = tuple[str, str, str]


def workspace_parts(memory: MemoryBreakdown | None) -> list[Part]:
    """Tensors, the allocator's cache and the context; one part where an older engine tells but their sum."""
    if memory is None or memory.allocated_bytes < 0 or memory.reserved_bytes < 0:
        told = memory.workspace_bytes if memory is not None and memory.workspace_bytes >= 0 else None
        return [Part("workspace", "Workspace", told, "workspace", "Activations, graphs and buffers")]
    kv = 0 if memory.kv_resident_bytes >= 0 else memory.kv_bytes  # pages are not of torch's allocator
    tensors = max(0, memory.allocated_bytes - memory.weights_bytes - kv)
    held = max(0, memory.reserved_bytes - memory.weights_bytes - kv)
    parts = [
        Part("workspace", "Workspace", tensors, "workspace", "In tensors beside weights and KV: graphs and buffers"),
        Part("torch_cache", "Kept by torch", held - min(tensors, held), "torch_cache", _kept_meaning(memory)),
    ]
    if memory.context_bytes >= 0:
        meaning = "CUDA's context, kernels and libraries, as it was when the engine began to serve"
        parts.append(Part("context", "CUDA context", memory.context_bytes, "context", meaning))
    return parts


def allocator_rows(memory: MemoryBreakdown | None) -> list[Row]:
    """Name, value and meaning of what the allocator and the plan of the memory say."""
    if memory is None:
        return []
    rows = [
        ("In tensors", memory.allocated_bytes, "By torch's allocator: weights, KV, graphs, buffers"),
        ("  at most", memory.peak_bytes, "At one time since the engine was loaded: how much a step takes on top"),
        ("Held by torch", memory.reserved_bytes, "In tensors, and kept for the next ones"),
        ("  split", memory.split_bytes, "Rests of blocks that are partly in use: what fragmentation costs"),
        ("Set aside for a step", memory.step_bytes, "Activations, logits and partial results of the largest step"),
        ("Set aside for graphs", memory.graphs_bytes, "Captured graphs and what they read and write"),
        ("Staging", memory.staging_bytes, "Buffers through which blocks go to host memory"),
    ]
    if memory.host_weights_bytes:
        told = "Copied to the device in each step; two of their layers at once are there, among its weights"
        rows.append(("Weights on the host", memory.host_weights_bytes, told))
    modules = [(f"  {part.name}", num_bytes(part.num_bytes), "Of the weights") for part in memory.modules]
    weights = [("Weights", num_bytes(memory.weights_bytes), "By what they are of"), *modules] if modules else []
    ranks = [_rank_row(rank) for rank in memory.ranks]
    return [*ranks, *weights, *((name, num_bytes(size), meaning) for name, size, meaning in rows if size >= 0)]


def _rank_row(rank: RankMemory) -> Row:
    meaning = (
        f"On {rank.device}: its share of the weights, {num_bytes(rank.weights_bytes)}, and its heads of every block"
    )
    return f"Rank {rank.rank}", num_bytes(rank.weights_bytes + rank.kv_bytes), meaning


def _kept_meaning(memory: MemoryBreakdown) -> str:
    split = f"; {num_bytes(memory.split_bytes)} of it are rests of blocks in use" if memory.split_bytes > 0 else ""
    return f"Held by torch's allocator for the next tensors{split}"
