"""How long a context the model's rotary embedding allows, and keeping it the same for all requests of a batch.

Rotary embeddings of type `dynamic` and `longrope` look at the longest sequence of the batch: a request's tokens
would depend on who runs beside it, and each step would wait for the device. Below their first limit they are
constant, so the context is limited to that, and the looking switched off.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from kvscope_engine.model.loading.hf_config import position_limit
from kvscope_telemetry.errors import BadInput

BATCH_DEPENDENT: Final = ("dynamic", "longrope")


def resolve_max_model_len(config: Any, asked: int | None, name: str) -> int:
    """Tokens of prompt and output together. Raises BadInput when `asked` is more than the model can."""
    limit, reason = _limit(config)
    if limit is None and asked is None:
        raise BadInput(f"model {name!r} does not say how long a context it was made for: give max_model_len")
    if limit is not None and asked is not None and asked > limit:
        raise BadInput(f"max_model_len={asked} is not accepted: model {name!r} can do {limit}{reason}")
    length = asked or limit
    assert length is not None, "one of them is given"
    return length


def freeze_rope(model: torch.nn.Module) -> None:
    """Switch off the looking at the batch; call when `max_model_len` is resolved."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_batch_dependent(kinds):
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            kinds |= {key: "default" for key, kind in kinds.items() if _is_batch_dependent(kind)}


def _limit(config: Any) -> tuple[int | None, str]:
    limit = position_limit(config)
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if not _is_batch_dependent(kind):
            continue
        original = parameters.get("original_max_position_embeddings")
        if kind == "longrope" and original is None:
            original = getattr(config, "original_max_position_embeddings", None)
        bounds = [value for value in (limit, original) if isinstance(value, int)]
        return min(bounds, default=None), f" with its rotary embedding of type {kind!r}"
    return limit, ""


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The parameters of the one rotary embedding, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def _is_batch_dependent(kind: str) -> bool:
    return any(name in kind for name in BATCH_DEPENDENT)
