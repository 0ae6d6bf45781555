"""Formats a plan for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_engine.model.device_memory.memory_plan import gib
from kvscope_engine.text_table import table
from kvscope_telemetry.messages.memory_plan import (
    Change,
    InferenceAnswer,
    PlanAnswer,
    PlanPart,
    TrainingAnswer,
    whole_of,
)


def plan_text(plan: PlanAnswer) -> str:
    modules = ", ".join(
        f"{name} {_number(count)}" for name, count in plan.modules if count >= plan.num_parameters // 200
    )
    head = f"{plan.model}: {plan.architecture}, {_number(plan.num_parameters)} parameters\n({modules})"
    paragraphs = [head, *_serving(plan.inference)]
    if plan.training is not None:
        paragraphs += _training(plan.training)
    return "\n\n".join(paragraphs)


def _serving(plan: InferenceAnswer) -> list[str]:
    gpus = f"{plan.num_gpus} GPUs of {gib(plan.gpu_bytes)}" if plan.num_gpus > 1 else f"a GPU of {gib(plan.gpu_bytes)}"
    paragraphs = [f"Serving on {gpus}, of which {gib(plan.allowed_bytes)} may be used: {_verdict(plan)}"]
    for stage in plan.stages:
        last = stage.first_layer + stage.num_layers - 1
        title = f"stage {stage.number}, layers {stage.first_layer} to {last}" if len(plan.stages) > 1 else "part"
        paragraphs.append(_parts(title, stage.parts, plan.gpu_bytes))
    if plan.fits:
        paragraphs.append(
            f"KV cache: {plan.kv_bytes_a_token / 1024:,.1f} KiB a token, {plan.num_blocks:,} blocks of"
            f" {plan.block_size} tokens, {plan.num_tokens:,} tokens" + _in_host_memory(plan)
        )
        rows = [(f"{room.num_tokens:,}", f"{room.num_requests:,}") for room in plan.rooms]
        paragraphs.append(table(("tokens a request", "concurrent requests"), rows))
    paragraphs += _changes(plan.changes, "to let more fit")
    return [*paragraphs, *plan.notes]


def _in_host_memory(plan: InferenceAnswer) -> str:
    parts = [f"{plan.num_host_blocks:,} blocks"] if plan.num_host_blocks else []
    parts += [f"{plan.num_host_states:,} states ({gib(plan.host_state_bytes)})"] if plan.num_host_states else []
    return f"; {' and '.join(parts)} in host memory" if parts else ""


def _verdict(plan: InferenceAnswer) -> str:
    if not plan.fits:
        return "it does not fit"
    if not plan.holds_longest:
        return f"it fits, but there is no memory for one request of {plan.max_model_len:,} tokens"
    return "it fits"


def _training(plan: TrainingAnswer) -> list[str]:
    fits = "it fits" if plan.fits else f"it does not fit into {gib(plan.gpu_bytes)}"
    paragraphs = [
        f"Training: {gib(plan.peak_bytes)} at the worst moment ({plan.worst}): {fits}",
        _parts("part", plan.parts, plan.gpu_bytes),
        *_changes(plan.changes, "to make it smaller"),
    ]
    return [*paragraphs, *plan.notes]


def _changes(changes: Sequence[Change], title: str) -> list[str]:
    if not changes:
        return []
    rows = [
        (
            change.options,
            f"{change.num_tokens:,}" if change.num_tokens else "",
            f"{change.num_requests:,}" if change.num_tokens else "",
            "fits" if change.fits else "does not fit",
            change.note,
        )
        for change in changes
    ]
    if not any(change.num_tokens for change in changes):
        return [table((title, "", ""), [(row[0], row[3], row[4]) for row in rows], left_aligned=(0, 1, 2))]
    return [
        table(
            (title, "tokens", "concurrent max-length requests", "what it costs"),
            [(*row[:3], row[4]) for row in rows],
            left_aligned=(0, 3),
        )
    ]


def _parts(title: str, parts: Sequence[PlanPart], gpu_bytes: int) -> str:
    whole = whole_of(parts, gpu_bytes)
    rows = [(part.name, gib(part.num_bytes), f"{100 * part.num_bytes / whole:.0f} %", part.how) for part in parts]
    return table((title, "size", f"of {gib(whole)}", "how it is computed"), rows, left_aligned=(0, 3))


def _number(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}" if count < 10 * size else f"{count / size:.1f} {unit}"
    return str(count)
