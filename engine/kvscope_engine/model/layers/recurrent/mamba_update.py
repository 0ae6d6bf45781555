"""In-place update of Mamba 2 layers for one token: the result of transformers' update in half as many passes.

transformers expands the decay of a head to its whole state before it computes the exponential, and writes the new state
to other memory: nine passes over each state, of which four remain here. Also makes a layer's own `forward` call this
update. As for all layers, the result is compared with transformers when the model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import silu, softplus

NO_LIMITS: Final = (0.0, float("inf"))
UPDATE_FUNCTION: Final = "mamba2_selective_state_update"
"""Name in transformers of the function that updates a Mamba 2 state with one token."""


def forward_calling(module: nn.Module, name: str, other: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the `forward` of `module` with the global function `name` replaced by `other`; None if it does not call
    it.
    """
    forward: Any = inspect.unwrap(type(module).forward)
    names = getattr(forward, "__globals__", {})
    if name not in names or name not in forward.__code__.co_names:
        return None
    copied = FunctionType(
        forward.__code__, names | {name: other}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    bound: Callable[..., Any] = copied.__get__(module)
    return bound


def limits_steps(module: nn.Module) -> bool:
    """Whether a Mamba 2 layer limits its time steps. transformers applies these limits only in the code that
    processes several tokens in chunks, not in its update for one token.
    """
    return tuple(getattr(module, "time_step_limit", NO_LIMITS)) != NO_LIMITS


def with_in_place_update(module: nn.Module, is_in_prompt: Callable[[], bool]) -> Callable[..., Any] | None:
    """Return the `forward` of a Mamba 2 layer with `update_in_place`; None for other layers.

    While `is_in_prompt()`, the time step of a single token is limited (`time_step_limit`), so that the result is the
    same as within a longer prompt. transformers' update of one token does not apply these limits; its code for several
    tokens does.
    """
    original: Any = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get(UPDATE_FUNCTION)

    def update(
        state: torch.Tensor, hidden: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        if limits_steps(module) and is_in_prompt():
            bias, is_soft = options.pop("dt_bias", None), options.pop("dt_softplus", False)
            dt = dt if bias is None else dt + bias.to(dt.dtype)
            dt = (softplus(dt) if is_soft else dt).clamp(*module.time_step_limit)  # type: ignore[misc]
        on_cpu = state.device.type == "cpu" and state.dtype == torch.float32  # GPUs may have kernels
        is_supported = on_cpu and _is_per_head(dt, A, options.get("dt_bias"))
        return (update_in_place if is_supported else original)(state, hidden, dt, A, *rest, **options)

    return forward_calling(module, UPDATE_FUNCTION, update)


def update_in_place(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Update `state` and return the layer's output (b, heads, dim).

    Args:
        state: (b, heads, dim, N) float32.
        hidden_states: (b, heads, dim).
        dt: (b, heads, dim), equal within a head, like its bias.
        A: (heads, dim, N), equal within a head.
        B: (b, groups, N).
        C: (b, groups, N).
    """
    batch, heads, dim = hidden_states.shape
    step = dt[..., :1] if dt_bias is None else dt[..., :1] + dt_bias[:, :1].to(dt.dtype)
    step = (softplus(step) if dt_softplus else step)[..., None]
    decay = torch.exp(step.float() * A[:, :1, :1].float())
    B, C = (each.repeat_interleave(heads // each.shape[1], 1) for each in (B, C))
    state.mul_(decay).add_((step * B[:, :, None]) * hidden_states[..., None])
    read = state.to(C.dtype).reshape(batch * heads, dim, -1)
    out = torch.bmm(read, C.reshape(batch * heads, -1, 1)).view(batch, heads, dim)
    if D is not None:
        out = (out + hidden_states * D).to(out.dtype)
    if z is not None:
        out = out * silu(z)
    return out.to(hidden_states.dtype)


def _is_per_head(dt: torch.Tensor, A: torch.Tensor, dt_bias: torch.Tensor | None) -> bool:
    """Whether dt, A and the bias have one number per head, expanded without a copy."""
    return dt.stride(-1) == 0 and A.stride()[-2:] == (0, 0) and (dt_bias is None or dt_bias.stride(-1) == 0)
