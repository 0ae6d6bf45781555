"""Checks at load whether a model can run with kvscope's attention, by running it instead of by a list of names.

A tiny forward pass must reach the attention hook exactly once per layer, with no unsupported keyword. A few short
sequences, paged and in chunks, must then give the same result in every layer as transformers' eager attention
(`eager_check`). A model that fails is refused, naming the architecture, and never run with wrong results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_engine.model.hf_config import num_query_heads, position_limit
from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.model.layers.attention.first_position import count_from_first
from kvscope_engine.model.layers.attention.mla.latent_modules import store_expanded, store_latents
from kvscope_engine.model.layers.attention.paged_attention import (
    ATTENTION_NAME,
    AttentionContext,
    AttentionOptions,
    register_attention,
)
from kvscope_engine.model.layers.attention.position_cache import install_position_cache, position_cache
from kvscope_engine.model.layers.attention.query_bias import has_distance_bias, use_distance_bias
from kvscope_engine.model.layers.attention_interface import uses_interface
from kvscope_engine.model.layers.own_forward import accepts_cache, install_own_forward, remove_own_forward
from kvscope_engine.model.layers.recurrent.recurrent_layers import RecurrentLayers, recurrent_layers
from kvscope_engine.model.verification.eager_check import DiffersError, check_equals_eager
from kvscope_engine.model.verification.layer_trace import LayerLocation, Trace, decoder_layer_of, number_of
from kvscope_engine.model.verification.own_check import check_own_forward
from kvscope_engine.model.verification.passed_checks import PassedChecks
from kvscope_engine.model.verification.recurrent_check import StateTrial
from kvscope_telemetry.errors import BadInput

KEYWORD: Final = "paged"
NUM_TOKENS: Final = 5
_FAILURES: Final = (BadInput, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""Errors that a model's code may raise. One line of the message is reported."""
_SERVED_KEYWORDS: Final = frozenset({"paged", "scaling", "sliding_window", "softcap", "s_aux"})
_HARMLESS_KEYWORDS: Final = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "layer_idx",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_SERVED_LAYER_TYPES: Final = frozenset({"chunked_attention", "full_attention", "sliding_attention"})
_RECURRENT_LAYER_TYPES: Final = frozenset(
    {"attention", "conv", "dummy", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mlp", "moe"}
)
"""Additional values of transformers' `layer_types` that are accepted if the model has recurrent layers."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's call of the attention hook."""

    layer: int
    """Index of the layer among the layers with attention."""
    shape: LayerShape
    num_query_heads: int
    options: AttentionOptions
    location: LayerLocation


class _NotPassedOnError(BadInput):
    """A decoder layer does not pass the keyword argument `paged` on to its attention module."""


class _CountsTokensError(BadInput):
    """A layer's attention computes positions by counting its tokens, instead of using the positions passed to
    the model.
    """


@dataclass(slots=True)
class _RecordingContext(AttentionContext):
    """Attention context that records calls and returns zeros."""

    calls: list[LayerCall] = field(default_factory=list)
    caller: str = ""
    keys: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Key tensor of each attention call, with the layer's index."""
    scratch: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    states: StateTrial = field(default_factory=StateTrial)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
            raise BadInput("its layers attend to other tokens than their own (cross attention)")
        shape = replace(_shape(query, key, value, options), shares_with=self._source())
        location = LayerLocation(layer, decoder_layer_of(self.caller), self.caller)
        self.calls.append(LayerCall(layer, shape, int(query.shape[1]), options, location))
        return query.new_zeros(query.shape[0], query.shape[1], options.value_dim(value))

    def _source(self) -> int | None:
        """Return the index of the earlier layer that passed the same key tensor object; None if there is none."""
        key, layer = self.keys[-1]
        return next(
            (
                earlier_layer
                for earlier_key, earlier_layer in self.keys
                if earlier_key is key and earlier_layer != layer
            ),
            None,
        )


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> LayerShape:
    latents = options.latents
    if latents is not None:
        return LayerShape(1, latents.stored_dim, latent_dim=latents.latent_dim)
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[2] != key.shape[2]:
        raise BadInput(f"its heads do not match: query {_heads(query)}, key {_heads(key)}, value {_heads(value)}")
    return LayerShape(int(key.shape[1]), max(int(key.shape[2]), int(value.shape[2])))


def check_hook(module: nn.Module, passed: PassedChecks | None = None) -> tuple[LayerCall, ...]:
    """Install kvscope's attention in `module` and check that the model is supported.

    Returns each layer's call, first to last. The result is stored on the module, so that further calls are free. If
    `passed` has a record of the model, its results are not compared again.

    Raises BadInput, naming the architecture, if the model is not supported.
    """
    calls: tuple[LayerCall, ...] | None = getattr(module, "kvscope_layer_calls", None)
    if calls is None:
        register_attention()
        trace: Trace | None = None
        try:
            calls, trace = _checked_with_latents(module, passed or PassedChecks())
        except torch.OutOfMemoryError:
            raise
        except DiffersError as error:
            raise _refusal(module, _reason_text(error)) from error
        except _FAILURES as error:
            calls = _checked_own(module, error)
        module.kvscope_layer_calls = calls  # type: ignore[assignment]
        module.kvscope_plain_trace = trace  # type: ignore[assignment]
    return calls


def _checked_own(module: nn.Module, error: Exception) -> tuple[LayerCall, ...]:
    """Switch a model that can't use kvscope's attention to its own forward code, check it, and return its layers.

    Raises BadInput with both reasons if its results are wrong in that way too. `error` is why kvscope's attention
    cannot be used.
    """
    try:
        calls = own_calls(module, _reason_text(error))
        check_own_forward(module)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as own_error:
        remove_own_forward(module)
        raise _refusal(
            module, f"{_reason_text(error)}; by transformers' own code: {_reason_text(own_error)}"
        ) from error
    return calls


def _refusal(module: nn.Module, reason: str) -> BadInput:
    """Return an error that refuses the model. The error states `reason`, or names a damaged weight if the model
    has one.
    """
    weight = bad_weight(module)
    if weight is not None:
        return BadInput(f"the model is damaged: its weight {weight}")
    return BadInput(f"model architecture {type(module).__name__} is not supported: {reason:.400}")


def own_calls(module: nn.Module, reason: str) -> tuple[LayerCall, ...]:
    """Switch `module` to its own forward code. Returns a `LayerCall` for each layer, with the shape of the data that
    the layer stores, recorded in a run of a few tokens.

    Raises BadInput, or any error of the model, if that is impossible.
    """
    if getattr(module.config, "is_encoder_decoder", False) or not accepts_cache(module):
        raise BadInput("it takes no cache of transformers")
    store_expanded(module)
    own, dtype = install_own_forward(module, reason), next(module.parameters()).dtype
    heads = num_query_heads(module.config.get_text_config(decoder=True))  # type: ignore[operator, union-attr]
    return tuple(
        LayerCall(
            index,
            layer.shape(dtype),
            heads,
            AttentionOptions(scale=1.0, sliding_window=layer.window or None),
            LayerLocation(index, decoder_layer_of(layer.module), layer.module),
        )
        for index, layer in enumerate(own.layers)
    )


def _reason_text(error: Exception) -> str:
    line = " ".join(str(error).split())
    return line if isinstance(error, BadInput) else f"a trial run failed ({type(error).__name__}: {line:.160})"


def pop_plain_trace(module: nn.Module) -> Trace | None:
    """Return and remove the trace of layer outputs that the check recorded; None if there is none.

    It is valid only until the model is changed.
    """
    trace: Trace | None = getattr(module, "kvscope_plain_trace", None)
    module.kvscope_plain_trace = None  # type: ignore[assignment]
    return trace


def _checked_with_latents(module: nn.Module, passed: PassedChecks) -> tuple[tuple[LayerCall, ...], Trace | None]:
    """Check the model with latents (MLA) in the cache, or, if that fails, with keys and values."""
    try:
        if passed.record is not None:
            return _recorded_calls(module, with_latents=True)[0], None
        if recurrent_layers(module).layers:  # their checks determine how they run
            passed.discard()
        return _checked(module)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        passed.discard()
        if not store_expanded(module):
            raise
        checked = _checked(module, with_latents=False)
        module.kvscope_why_expanded = " ".join(str(error).split())  # type: ignore[assignment]
        return checked


def _checked(module: nn.Module, *, with_latents: bool = True) -> tuple[tuple[LayerCall, ...], Trace | None]:
    calls, trial = _recorded_calls(module, with_latents=with_latents)
    trial.check_layers(recurrent_layers(module))
    shapes, locations = [call.shape for call in calls], [call.location for call in calls]
    return calls, check_equals_eager(module, shapes, locations)


def record_calls(module: nn.Module, *, with_latents: bool = True) -> tuple[LayerCall, ...]:
    """Return each layer's call of the attention hook in a run of a few tokens. Works for tensors without data too.

    Afterwards, layers that can store latents do so, and the states of recurrent layers are recorded
    (`recurrent_layers`).

    Raises BadInput, or any error of the model, if it is not supported.
    """
    try:
        return _recorded_calls(module, with_latents=with_latents)[0]
    except _FAILURES as error:
        try:
            return own_calls(module, _reason_text(error))
        except _FAILURES as own_error:
            remove_own_forward(module)
            raise BadInput(f"{_reason_text(error)}; by transformers' own code: {_reason_text(own_error)}") from error


def _recorded_calls(module: nn.Module, *, with_latents: bool) -> tuple[tuple[LayerCall, ...], StateTrial]:
    config: Any = module.config
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput("it is an encoder-decoder model; only decoder-only models are supported")
    text_config = config.get_text_config(decoder=True)
    recurrent = recurrent_layers(module)
    _check_layer_types(text_config, recurrent)
    if with_latents:
        store_latents(module, ATTENTION_NAME)
    use_distance_bias(module, ATTENTION_NAME)
    count_from_first(module)
    recording = _record_with_hooks(module)
    if recurrent.layers:
        calls = _numbered_calls(module, recording.calls)
    else:
        calls = sorted(recording.calls, key=lambda call: call.layer)
        _check_once_a_layer(calls, int(text_config.num_hidden_layers))
    _check_windows(calls, text_config)
    return tuple(calls), recording.states


def _check_layer_types(text_config: Any, recurrent: RecurrentLayers) -> None:
    types = getattr(text_config, "layer_types", None) or ()
    unknown = set(types) - (_SERVED_LAYER_TYPES | _RECURRENT_LAYER_TYPES if recurrent.layers else _SERVED_LAYER_TYPES)
    if unknown:
        raise BadInput(
            f"it has layers of type {', '.join(sorted(unknown))}; only full, sliding and chunked attention are "
            "supported"
        )


def _numbered_calls(module: nn.Module, calls: list[LayerCall]) -> list[LayerCall]:
    """Number the attention layers of a model with recurrent layers separately, in the order in which they run.

    Attention reads the index from its module (`paged_attention.layer_of`).
    """
    names = [call.location.attention for call in calls]
    attending = [name for name, submodule in module.named_modules() if uses_interface(type(submodule))]
    if sorted(names) != sorted(attending):
        raise BadInput(
            f"{len(set(names))} of its {len(attending)} attention modules use transformers' attention interface "
            f"({len(names)} calls); each must use it exactly once"
        )
    numbered = []
    for index, call in enumerate(calls):
        module.get_submodule(call.location.attention).kvscope_layer = index  # type: ignore[assignment]
        location = replace(call.location, layer=number_of(call.location.decoder_layer))
        shape = replace(call.shape, shares_with=None)  # it would refer to the old numbers
        numbered.append(replace(call, layer=index, location=location, shape=shape))
    return numbered


def _record_with_hooks(module: nn.Module) -> _RecordingContext:
    """Record each layer's call of the attention hook.

    If that fails, install hooks that pass keywords on or supply positions, as the model needs, and try again.
    """
    try:
        return _record(module)
    except _NotPassedOnError:
        pass_keywords_on(module)
    except _CountsTokensError:
        if position_cache(module) is not None:
            raise
        install_position_cache(module)
    return _record(module)


def _record(module: nn.Module) -> _RecordingContext:
    _set_attention(module)
    recording = _RecordingContext()
    device = next(module.parameters()).device
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    with torch.inference_mode(), _recording_hook(module, recording):
        module(input_ids=positions + 1, position_ids=positions, use_cache=False, paged=recording)
    return recording


def _set_attention(module: nn.Module) -> None:
    """Install kvscope's attention. Raises BadInput if the model does not support that, where transformers would only
    warn.
    """
    if not recurrent_layers(module).has_attention:
        return
    can_set = getattr(type(module), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise BadInput("its attention cannot be replaced")
    module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]


@contextmanager
def _recording_hook(model: nn.Module, recording: _RecordingContext) -> Iterator[None]:
    """Return a context with an attention hook that records calls and refuses unsupported keywords that change
    attention.
    """
    from transformers import AttentionInterface

    from kvscope_engine.model.layers.attention.paged_attention import layer_of, paged_attention

    names = {id(part): name for name, part in model.named_modules()}
    counting = _CountingWatch(model)

    def watched(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        _refuse_unknown(module, attention_mask, kwargs)
        counting.check(module)
        recording.caller = names.get(id(module), "")
        recording.keys.append((key, layer_of(module)))
        return paged_attention(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(ATTENTION_NAME, watched)
    try:
        with counting:
            yield
    finally:
        register_attention()


class _CountingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses attention that counts its tokens itself, which gives wrong positions in a batch of several sequences.

    Attention that reads the number of previous tokens from a cache is accepted if the cache is a `PositionCache`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_counts = 0
        self._before: dict[int, tuple[int, int]] = {}
        self._position_cache = position_cache(model)
        self._handles = [part.register_forward_pre_hook(self._enter) for part in model.modules()]

    def check(self, attention: nn.Module) -> None:
        """Raise `_CountsTokensError` if the module counts tokens. Call it from inside the attention module's
        `forward`."""
        num_counts, num_queries = self._before.get(id(attention), self._counts)
        if self._num_counts != num_counts and self._counts[1] == num_queries:
            raise _CountsTokensError(
                "its attention counts tokens to get their positions, which is wrong if several sequences share a batch"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_counts += func.overloadpacket is torch.ops.aten.arange
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, part: nn.Module, _: Any) -> None:
        self._before[id(part)] = self._counts

    @property
    def _counts(self) -> tuple[int, int]:
        return self._num_counts, 0 if self._position_cache is None else self._position_cache.num_queries


def _refuse_unknown(module: nn.Module, mask: Any, kwargs: dict[str, Any]) -> None:
    if mask is not None:
        raise BadInput("its attention uses its own mask")
    if kwargs.get("paged") is None:
        raise _NotPassedOnError("its attention does not pass keyword arguments on")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise BadInput("its attention is not causal")
    known = _SERVED_KEYWORDS | _HARMLESS_KEYWORDS | {"is_causal"}
    known |= {"position_bias", "sinks"} if has_distance_bias(module) else frozenset()
    unknown = sorted(name for name, value in kwargs.items() if name not in known and value is not None)
    if unknown:
        raise BadInput(f"its attention needs {', '.join(unknown)}, which is not supported")


def _check_once_a_layer(calls: list[LayerCall], num_layers: int) -> None:
    layers = [call.layer for call in calls]
    if layers != list(range(num_layers)):
        raise BadInput(
            f"{len(set(layers))} of its {num_layers} layers use transformers' attention interface ({len(layers)} "
            "calls); each must use it exactly once"
        )


def _check_windows(calls: list[LayerCall], text_config: Any) -> None:
    """Raise BadInput if a window or chunk length would be lost because the model applies it only in the mask."""
    limit, types = position_limit(text_config), getattr(text_config, "layer_types", None)
    kinds = [types[call.location.layer] for call in calls if call.location.layer < len(types)] if types else []
    for reason, size, layer_kinds, is_chunked in (
        ("sliding window", "sliding_window", ("sliding_attention", "hybrid_sliding"), False),
        ("chunk of attention", "attention_chunk_size", ("chunked_attention",), True),
    ):
        length = getattr(text_config, size, None)
        if length is not None and limit is not None and length >= limit:
            continue  # the context is not longer
        has_window = [
            call.options.sliding_window is not None and call.options.is_chunked == is_chunked for call in calls
        ]
        is_lost = [kind in layer_kinds and not has for kind, has in zip(kinds, has_window, strict=False)]
        if any(is_lost) or (length is not None and not types and not any(has_window)):
            raise BadInput(f"its {reason} ({length}) is not passed to the attention function")


def _heads(tensor: torch.Tensor) -> str:
    return f"{tensor.shape[1]} x {tensor.shape[2]}"


@torch.inference_mode()
def bad_weight(module: nn.Module) -> str | None:
    """Describe a weight that contains NaN or infinity, with its name; None if all weights are finite.

    Called only if a model's results are wrong, because reading all weights takes time.
    """
    for name, tensor in module.named_parameters():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            value = "NaN" if bool(tensor.isnan().any()) else "infinity"
            return f"{name} holds {value}"
    return None


def pass_keywords_on(module: nn.Module) -> None:
    """Pass the keyword argument `paged` of each layer in `module` on to the layer's attention, by hooks on both.

    For models with layers that do not do so themselves. The hooks keep the argument only while the layer runs.
    Attention modules that do not use transformers' attention interface are not changed.
    """
    for layer in list(module.modules()):
        for child in layer.children():
            if uses_interface(type(child)):
                _bridge(layer, child)


def _bridge(layer: nn.Module, attention: nn.Module) -> None:
    passed_on: dict[str, Any] = {}

    def store_keywords(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        passed_on.update((name, kwargs[name]) for name in (KEYWORD,) if name in kwargs)

    def add_keywords(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, passed_on | kwargs

    def clear_keywords(*_: Any) -> None:
        passed_on.clear()

    layer.register_forward_pre_hook(store_keywords, with_kwargs=True)
    attention.register_forward_pre_hook(add_keywords, with_kwargs=True)
    layer.register_forward_hook(clear_keywords, always_call=True)
