"""Device memory that an engine uses besides weights and KV, as reported by PyTorch's allocator. Imports no Qt.

On a GPU, the allocator reports the memory in tensors and the memory cached for new ones. On a CPU it reports nothing.
"""

from __future__ import annotations

from kvscope_app.ui.number_text import num_bytes
from kvscope_app.views.memory.memory_part import MemoryPart
from kvscope_telemetry.messages.telemetry import MemoryBreakdown, RankMemory

Row = tuple[str, str, str]


def workspace_parts(memory: MemoryBreakdown | None) -> list[MemoryPart]:
    """Return memory parts for tensors, the allocator's cache and the CUDA context.

    For an older engine, which reports only their sum, the sum is the only part.
    """
    if memory is None or memory.allocated_bytes < 0 or memory.reserved_bytes < 0:
        workspace_bytes = memory.workspace_bytes if memory is not None and memory.workspace_bytes >= 0 else None
        return [MemoryPart("workspace", "Workspace", workspace_bytes, "workspace", "Activations, graphs and buffers")]
    kv = 0 if memory.kv_resident_bytes >= 0 else memory.kv_bytes  # virtual KV pages are not allocated by PyTorch
    tensors = max(0, memory.allocated_bytes - memory.weights_bytes - kv)
    reserved = max(0, memory.reserved_bytes - memory.weights_bytes - kv)
    parts = [
        MemoryPart(
            "workspace", "Workspace", tensors, "workspace", "Tensors other than weights and KV: graphs and buffers"
        ),
        MemoryPart(
            "torch_cache",
            "Cached by PyTorch",
            reserved - min(tensors, reserved),
            "torch_cache",
            _cached_meaning(memory),
        ),
    ]
    if memory.context_bytes >= 0:
        meaning = "CUDA context, kernels and libraries, measured when the engine started to serve"
        parts.append(MemoryPart("context", "CUDA context", memory.context_bytes, "context", meaning))
    return parts


def allocator_rows(memory: MemoryBreakdown | None) -> list[Row]:
    if memory is None:
        return []
    rows = [
        ("In tensors", memory.allocated_bytes, "By PyTorch's allocator: weights, KV, graphs, buffers"),
        (
            "  peak",
            memory.peak_bytes,
            "Peak since the engine was loaded, including the memory that a step needs temporarily",
        ),
        ("Reserved by PyTorch", memory.reserved_bytes, "In tensors, and cached for new ones"),
        ("  split", memory.split_bytes, "Unused parts of partly used blocks: the cost of fragmentation"),
        ("Reserved for a step", memory.step_bytes, "Activations, logits and partial results of the largest step"),
        ("Reserved for graphs", memory.graphs_bytes, "Captured graphs and their buffers"),
        ("Staging", memory.staging_bytes, "Buffers for copies to host memory"),
    ]
    if memory.host_weights_bytes:
        tip = "Copied to the device each step, two layers at a time"
        rows.append(("Weights on the host", memory.host_weights_bytes, tip))
    modules = [(f"  {part.name}", num_bytes(part.num_bytes), "Part of the weights") for part in memory.modules]
    weights = [("Weights", num_bytes(memory.weights_bytes), "By component"), *modules] if modules else []
    ranks = [_rank_row(rank) for rank in memory.ranks]
    return [*ranks, *weights, *((name, num_bytes(size), meaning) for name, size, meaning in rows if size >= 0)]


def _rank_row(rank: RankMemory) -> Row:
    gpu = f"{rank.device} ({rank.uuid})" if rank.uuid else rank.device
    meaning = f"Held on {gpu}: {num_bytes(rank.weights_bytes)} of the weights, and this rank's heads of every block"
    return f"Rank {rank.rank}", num_bytes(rank.weights_bytes + rank.kv_bytes), meaning


def _cached_meaning(memory: MemoryBreakdown) -> str:
    split = (
        f"; {num_bytes(memory.split_bytes)} of it are unused parts of blocks in use" if memory.split_bytes > 0 else ""
    )
    return f"Held by torch's allocator for the next tensors{split}"
