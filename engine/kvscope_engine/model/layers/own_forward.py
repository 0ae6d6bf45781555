"""Runs models with transformers' own attention code over the paged KV cache, if kvscope's attention cannot replace it.

Such a model's attention remains transformers' code (score biases, an indexer that selects tokens, two attentions per
layer, custom masks). Each sequence of the flattened batch is a call of the model. If `own_check` has shown that batches
give the same results, decodes of several sequences run in one call, padded on the left like prompts in `generate`. The
model gets a transformers `Cache` whose layers store nothing: they write their inputs to the sequences' KV blocks and
read their results from there. The data of a token in one layer (key, value, and an indexer's key) is adjacent in one
row of the layer's tensor, bit for bit as the model produced it. States of recurrent layers are in `StateStorage`.

Owns the cache and the calls. `own_check` verifies at load that a model gives the same result this way as without a
cache. Must not depend on scheduling or on how blocks are allocated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvscope_engine.model.hf_config import largest, latent_ranks, num_query_heads
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape, TokenPart
from kvscope_engine.model.kv_cache.state_storage import LayerState, StatePart
from kvscope_engine.model.layers.recurrent.recurrent_layers import StateBatch, recurrent_layers
from kvscope_telemetry.errors import BadInput

KEY: Final = "key"
VALUE: Final = "value"
INDEX: Final = "index"
"""Name of the `TokenPart` that an indexer stores per token."""
_EXPANDED: Final = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ORDER: Final = (KEY, VALUE, INDEX)
MAX_SCORES: Final = 1 << 27
"""Maximum number of attention scores of one call, over all query heads: 512 MiB in float32.

A long prompt with a long context is run in several calls that each stay below this limit.
"""
MIN_PIECE_TOKENS: Final = 32
"""Minimum number of a prompt's tokens per call; see `MAX_SCORES`.

Fewer tokens save little, because each call may expand the context's keys and values.
"""
_ATTRIBUTE: Final = "kvscope_own_forward"
_SUPPORTED_LAYERS: Final = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)


class SequenceCache(Protocol):
    """Cached keys and values of the sequences of one call, in KV blocks or in a stub."""

    past: int
    """Number of tokens cached before the current call. With several sequences, this is the number for the
    longest one.
    """

    def write(self, layer: int, name: str, values: torch.Tensor) -> None:
        """Store `values`, (sequences, T, ...), for the tokens of the call. `layer` is transformers' layer index."""

    def read(self, layer: int, name: str, first: int) -> torch.Tensor:
        """Return the stored values, (sequences, n, ...), from token `first` up to the last token of the call."""

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of the cached tokens, (sequences, past)."""
        return torch.arange(self.past, device=device)[None]


class _LayerInBlocks:
    """Mixin for cache layers of transformers that stores data in the `SequenceCache` instead of in tensors."""

    _layer_type = None
    is_sliding: bool
    sliding_window: int
    number: int
    tokens: SequenceCache
    num_seen: int
    holders: list[_LayerInBlocks]
    """List that all layers of a cache share. It contains the layer that currently holds tensors read from the cache, if
    any.
    """

    def start_call(self, number: int, tokens: SequenceCache, device: torch.device) -> None:
        self.number, self.tokens, self.num_seen = number, tokens, tokens.past
        self.release_tensors()
        self.is_initialized = tokens.past > 0
        self.cumulative_length = tokens.past

    def release_tensors(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def become_holder(self) -> None:
        """Release the tensors of the layer that ran before, so that only one layer's context is in memory."""
        if self.holders and self.holders[-1] is not self:
            self.holders.pop().release_tensors()
        if not self.holders:
            self.holders.append(self)

    def get_seq_length(self) -> int:
        return self.num_seen

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of the call.

        Returns keys and values of all tokens that the layer may read, (sequences, heads, T, dim) each.
        """
        self.become_holder()
        past, tokens = self.tokens.past, self.tokens
        first = max(0, past - self.sliding_window + 1) if self.is_sliding else 0
        all_tensors = []
        for name, new_tensor in ((KEY, keys), (VALUE, values)):
            tokens.write(self.number, name, new_tensor.transpose(1, 2))
            all_tensors.append(tokens.read(self.number, name, first).transpose(1, 2))
        self.num_seen = self.cumulative_length = past + keys.shape[-2]
        self.is_initialized = True
        self.keys, self.values = all_tensors
        return self.keys, self.values


class _IndexedLayerInBlocks(_LayerInBlocks):
    position_dims = 0
    """Number of position dimensions that the model stores for the indexer; 0 if it stores no positions."""

    def start_call(self, number: int, tokens: SequenceCache, device: torch.device) -> None:
        super().start_call(number, tokens, device)
        self.is_indexer_initialized = tokens.past > 0
        self.indexer_position_ids: torch.Tensor | None = None
        if self.position_dims and tokens.past:
            self.indexer_position_ids = tokens.positions(device).expand(self.position_dims, -1, -1)

    def release_tensors(self) -> None:
        super().release_tensors()
        self.indexer_keys: torch.Tensor | None = None

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Store the indexer keys (sequences, T, dim) of the call. Returns the indexer keys of all tokens."""
        self.become_holder()
        self.tokens.write(self.number, INDEX, states)
        self.indexer_keys = self.tokens.read(self.number, INDEX, 0)
        return self.indexer_keys


@dataclass(slots=True)
class _RecordingCache(SequenceCache):
    """Stub that records the tensors that each layer stores per token."""

    parts: dict[int, list[TokenPart]] = field(default_factory=dict)
    past: int = 0
    values: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    module_names: dict[int, str] = field(default_factory=dict)
    """Name of the module that ran when a layer stored its first values, by layer."""
    running: list[tuple[str, nn.Module]] = field(default_factory=list)
    called: set[nn.Module] = field(default_factory=set)

    def write(self, layer: int, name: str, values: torch.Tensor) -> None:
        if (layer, name) in self.values:
            raise BadInput(f"its layer {layer} keeps the {name} of a token twice")
        self.values[layer, name] = values
        part = TokenPart(name, tuple(values.shape[2:]), values.dtype)
        self.parts.setdefault(layer, []).append(part)
        self.module_names.setdefault(layer, self.running[-1][0] if self.running else "")

    def read(self, layer: int, name: str, first: int) -> torch.Tensor:
        return self.values[layer, name]


@dataclass(slots=True)
class _ZeroCache(SequenceCache):
    """Stub with `past` cached tokens of zeros, to measure the memory of a call."""

    past: int
    new_values: torch.Tensor | None = None

    def write(self, layer: int, name: str, values: torch.Tensor) -> None:
        self.new_values = values

    def read(self, layer: int, name: str, first: int) -> torch.Tensor:
        assert self.new_values is not None, "it is read what was written"
        new_values, self.new_values = self.new_values, None
        return torch.cat(
            [new_values.new_zeros(len(new_values), self.past - first, *new_values.shape[2:]), new_values], 1
        )


@dataclass(slots=True)
class TokensInBlocks(SequenceCache):
    """Cache of sequences in the block pool, padded on the left so that all sequences end at the same column."""

    storage: KVStorage
    storage_layers: dict[int, int]
    """Index of a layer in `storage`, by the layer's index in transformers."""
    block_slots: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """For each KV group, the block of each token and the token's slot in it, both (sequences, tokens) int64."""
    indices: torch.Tensor
    """Position of each token in its sequence, shape (sequences, tokens)."""
    past: int = 0
    end: int = 0
    """Number of columns, including those of the call's tokens."""

    def write(self, layer: int, name: str, values: torch.Tensor) -> None:
        part, rows, blocks, slots = self._part_columns(layer, name)
        if (tuple(values.shape[2:]), values.dtype) != (part.shape, part.dtype):
            raise RuntimeError(f"the {name} of layer {layer} is {tuple(values.shape[2:])}, at load it was {part.shape}")
        columns = slice(self.past, self.end)
        rows[blocks[:, columns], slots[:, columns]] = values.flatten(2).contiguous().view(rows.dtype)

    def read(self, layer: int, name: str, first: int) -> torch.Tensor:
        part, rows, blocks, slots = self._part_columns(layer, name)
        values = rows[blocks[:, first : self.end], slots[:, first : self.end]]
        return values.view(part.dtype).view(*values.shape[:2], *part.shape)

    def positions(self, device: torch.device) -> torch.Tensor:
        return self.indices[:, : self.past]

    def _part_columns(self, layer: int, name: str) -> tuple[TokenPart, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the `TokenPart` called `name`, its columns in all token rows, and the sequences' blocks and slots."""
        storage_layer = self.storage_layers[layer]
        start = 0
        for part in self.storage.layers[storage_layer].parts:
            end = start + part.num_elements(self.storage.dtype)
            if part.name == name:
                rows = self.storage.rows_of_tokens(storage_layer)[..., start:end]
                return part, rows, *self.block_slots[self.storage.layer(storage_layer).group]
            start = end
        raise RuntimeError(f"layer {layer} keeps a {name} of a token, which it did not at load")


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """Sequences of a step, described in host memory, for a model that runs its own forward code."""

    query_start: Sequence[int]
    """First batch row of each sequence, followed by the total number of rows, (sequences + 1,)."""
    seq_lens: Sequence[int]
    """Length of each sequence including the step's tokens, (sequences,)."""
    rows: Sequence[int]
    """Rows of the batch whose logits are needed, ascending."""


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """Data that one layer of transformers' cache stores per token, as recorded at load."""

    number: int
    """Index of the layer in transformers' cache."""
    parts: tuple[TokenPart, ...]
    window: int
    """Number of tokens that the layer reads back; 0 for all tokens."""
    module: str
    """Name of the attention module in the model."""

    latent_dim: int = 0
    """Dimension of the latents, if the keys are latents (MLA), or 0."""

    def shape(self, dtype: torch.dtype) -> LayerShape:
        num_elements = sum(part.num_elements(dtype) for part in self.parts)
        return LayerShape(1, num_elements, latent_dim=self.latent_dim, parts=self.parts)


class OwnForward:
    """Runs a model through its own code. Create one per model: it switches the model to transformers' eager attention.

    Raises BadInput, or any error of the model, if the model stores something in its cache that is not supported.
    """

    def __init__(self, module: nn.Module, reason: str) -> None:
        self.reason = reason
        """Why kvscope's attention cannot be used."""
        self.row_watchers: list[Any] = []
        """Functions called before each call of the model, with the batch rows of the call: one list of rows per
        sequence.
        """
        model: Any = module
        self._module = model
        self._use_eager_attention()
        self._accepts_logits_to_keep = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._accepts_positions = _has_keyword(module, "position_ids")
        self.supports_batches = False
        """Whether decodes of several sequences can run in one call. `own_check` sets it."""
        text = model.config.get_text_config(decoder=True)
        self._num_heads = num_query_heads(text)
        self._position_dims: dict[int, int] = {}
        self._cache: Any = None
        self.called: frozenset[nn.Module] = frozenset()
        """Modules that run through their own `forward`."""
        self.layers, self.states, self._state_layers = self.record_layers()
        self._numbers = {layer.number: number for number, layer in enumerate(self.layers)}
        expanded = sum(largest(text, name) for name in _EXPANDED)
        widest = max((sum(map(math.prod, (part.shape for part in layer.parts))) for layer in self.layers), default=1)
        self._elements_per_token = max(widest, self._num_heads * (1 + expanded))
        """Elements per token that a call reads, or expands from a latent, in the layer with the most elements."""

    def run(self, ids: torch.Tensor, context: Any, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the logits (R, vocabulary) of `rows` of the batch; of all T rows if `rows` is None.

        If `context` is a `PagedContext` with an `OwnBatch`, the rows are taken from the `OwnBatch`, which is in host
        memory, so that `rows` need not be copied from the device. With any other context, the call measures memory:
        `ids` run as one sequence that does not use the block pool.
        """
        batch: OwnBatch | None = getattr(context, "own", None)
        if batch is None:
            longest = getattr(context, "longest", 0) or len(ids)
            return self._run_largest_calls(ids, len(ids) if rows is None else len(rows), longest)
        sampled_rows = () if rows is not None and not len(rows) else batch.rows
        logits: dict[int, torch.Tensor] = {}
        groups = self._decode_groups(batch) if self.supports_batches else []
        try:
            for numbers in groups:
                self._decode(ids, context, numbers, sampled_rows, logits)
            alone = set(range(len(batch.seq_lens))).difference(*groups)
            for number in sorted(alone):
                self._run_alone(ids, context, number, sampled_rows, logits)
        finally:
            self._release_tensors()
        return torch.cat([logits[row] for row in sorted(logits)]) if logits else ids.new_zeros(0)

    def _run_alone(
        self,
        ids: torch.Tensor,
        context: Any,
        number: int,
        sampled_rows: Sequence[int],
        row_logits: dict[int, torch.Tensor],
    ) -> None:
        """Run one sequence of the step in one or several calls. Adds the logits of each call to `row_logits`;
        the key is the first batch row of these logits.
        """
        batch: OwnBatch = context.own
        start, end = batch.query_start[number : number + 2]
        past = batch.seq_lens[number] - (end - start)
        tokens = self.tokens_in_blocks(context, [number], past + end - start)
        states = CallStates(context.states, [number]) if self.states else None
        has_initial_state = past > 0
        for first, last in self._pieces(start, end, past, () if states is None else states.cuts):
            tokens.past, tokens.end = past + first - start, past + last - start
            call_rows = [row - first for row in sampled_rows if first <= row < last]
            self._notify_watchers([list(range(first, last))])
            cache = self._cache_for_call(tokens, ids.device)
            if states is not None and has_initial_state:
                states.load_into(cache, self._state_layers, self.states)
            logits = self._call(ids[None, first:last], cache, call_rows)
            if logits is not None:
                row_logits[first + call_rows[0]] = logits[0]
            if states is not None:
                states.store_from(cache, self._state_layers, self.states, last)
            has_initial_state = True

    def _decode(
        self,
        ids: torch.Tensor,
        context: Any,
        numbers: Sequence[int],
        sampled_rows: Sequence[int],
        row_logits: dict[int, torch.Tensor],
    ) -> None:
        """Run one token each of several sequences of the step in one call, with shorter sequences padded on the
        left."""
        batch: OwnBatch = context.own
        lengths = [batch.seq_lens[number] for number in numbers]
        longest = max(lengths)
        tokens = self.tokens_in_blocks(context, numbers, longest)
        tokens.past, tokens.end = longest - 1, longest
        rows = [batch.query_start[number] for number in numbers]
        self._notify_watchers([[row] for row in rows])
        states = CallStates(context.states, numbers) if self.states else None
        cache = self._cache_for_call(tokens, ids.device)
        if states is not None:
            states.load_into(cache, self._state_layers, self.states)
        padding: dict[str, torch.Tensor] = {}
        if min(lengths) < longest:
            pads = longest - torch.tensor(lengths, device=ids.device)[:, None]
            padding["attention_mask"] = (torch.arange(longest, device=ids.device) >= pads).long()
            if self._accepts_positions:
                padding["position_ids"] = longest - 1 - pads
        token_ids = ids[torch.tensor(rows, device=ids.device)][:, None]
        logits = self._call(token_ids, cache, [0] if sampled_rows else (), padding)
        if logits is not None:
            row_logits |= {row: logits[index] for index, row in enumerate(rows) if row in set(sampled_rows)}
        if states is not None:
            states.store_from(cache, self._state_layers, self.states, rows[0] + 1)

    def _decode_groups(self, batch: OwnBatch) -> list[list[int]]:
        starts, lengths = batch.query_start, batch.seq_lens
        singles = [n for n in range(len(lengths)) if starts[n + 1] - starts[n] == 1 and lengths[n] > 1]
        groups: list[list[int]] = []
        for number in sorted(singles, key=lambda n: -lengths[n]):
            if not groups or len(groups[-1]) >= self.max_batched_decodes(lengths[groups[-1][0]]):
                groups.append([])
            groups[-1].append(number)
        return [group for group in groups if len(group) > 1]

    def max_batched_decodes(self, length: int) -> int:
        """Return the maximum number of sequences of up to `length` tokens in one call."""
        return max(1, MAX_SCORES // (self._elements_per_token * length))

    def tokens_in_blocks(self, context: Any, numbers: Sequence[int], longest: int) -> TokensInBlocks:
        """Return the cache of some sequences of the step. Padding on the left repeats the sequence's last token."""
        count, size, device = context.num_single_token, context.storage.block_size, context.storage.device
        lengths = torch.tensor([context.own.seq_lens[number] for number in numbers], device=device)[:, None]
        indices = torch.arange(longest, device=device)[None] - (longest - lengths)
        valid_indices = torch.where(indices < 0, lengths - 1, indices)
        blocks, slots, block_slots = valid_indices // size, valid_indices % size, []
        for group in range(context.storage.num_groups):
            tables = [
                context.decode.block_tables[group][number]
                if number < count
                else context.prefill.block_tables[group][number - count]
                for number in numbers
            ]
            block_slots.append((torch.stack(tables).long().gather(1, blocks), slots))
        return TokensInBlocks(context.storage, self._numbers, block_slots, indices.clamp_min(0))

    def _notify_watchers(self, rows: list[list[int]]) -> None:
        for watcher in self.row_watchers:
            watcher(rows)

    def _release_tensors(self) -> None:
        """Release the tensors that the cache has read for the last call."""
        for layer in self._cache.layers if self._cache is not None else ():
            if isinstance(layer, _LayerInBlocks):
                layer.release_tensors()
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                _reset_recurrent_layer(layer)

    def _run_largest_calls(self, ids: torch.Tensor, num_rows: int, longest: int) -> torch.Tensor:
        """Run the largest calls that a step can make, so that the caller can measure their memory, and return logits.

        The first call has as many tokens as fit at the end of a sequence of `longest` tokens, the second as many of
        `ids` as fit without earlier tokens, and the third is a batch of decodes, if batches are supported. The earlier
        tokens are zeros instead of blocks of the pool.
        """
        max_tokens = self.max_piece_tokens(longest)
        logits = []
        for count, past in {
            (min(len(ids), max_tokens), max(0, longest - max_tokens)),
            (min(len(ids), self.max_piece_tokens(len(ids))), 0),
        }:
            rows = range(max(0, count - num_rows), count)
            call_logits = self._call(ids[None, :count], self._cache_for_call(_ZeroCache(past), ids.device), rows)
            logits += [call_logits[0]] if call_logits is not None else []
        if self.supports_batches and (groups := min(len(ids), self.max_batched_decodes(longest))) > 1:
            self._call(ids[:groups, None], self._cache_for_call(_ZeroCache(longest - 1), ids.device), ())
        self._cache = None
        return torch.cat([logits[0]] * -(-num_rows // len(logits[0])))[:num_rows] if logits else ids.new_zeros(0)

    @property
    def batching_description(self) -> str:
        """Text for the user that describes which requests run together in one call."""
        return (
            "prompts one after the other, decodes together" if self.supports_batches else "one request after the other"
        )

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer selects which previous tokens a layer's attention reads."""
        return any(part.name == INDEX for layer in self.layers for part in layer.parts)

    def max_piece_tokens(self, length: int) -> int:
        """Return the maximum number of tokens of one call for a sequence of up to `length` tokens."""
        return max(MIN_PIECE_TOKENS, MAX_SCORES // (self._num_heads * max(1, length)))

    @contextmanager
    def new_cache(self) -> Iterator[None]:
        """Return a context with a new cache that is discarded afterwards. The caller may change the model's config
        inside.
        """
        self._cache = None
        yield
        self._cache = None

    def _pieces(self, start: int, end: int, past: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
        max_tokens, pieces = self.max_piece_tokens(past + end - start), list[tuple[int, int]]()
        ends = sorted({end, *(row for row in cuts if start < row < end)})
        for last in ends:
            first = pieces[-1][1] if pieces else start
            pieces += [(row, min(row + max_tokens, last)) for row in range(first, last, max_tokens)]
        return pieces

    def _call(
        self, ids: torch.Tensor, cache: Any, rows: Sequence[int], padding: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Return logits (sequences, rows, vocabulary) for ids (sequences, T), or None if no rows are needed."""
        keywords = {"input_ids": ids, "past_key_values": cache, "use_cache": True, **(padding or {})}
        if not rows:
            self._module.base_model(**keywords)
            return None
        count = ids.shape[1]
        is_all = len(rows) == count
        if self._accepts_logits_to_keep and not is_all:
            logits_to_keep = len(rows) if rows[0] == count - len(rows) else torch.tensor(rows, device=ids.device)
            return self._module(**keywords, logits_to_keep=logits_to_keep).logits  # type: ignore[no-any-return]
        logits: torch.Tensor = self._module(**keywords).logits
        return logits if is_all else logits[:, torch.tensor(rows, device=ids.device)]

    def _cache_for_call(self, tokens: SequenceCache, device: torch.device) -> Any:
        if self._cache is None:
            self._cache = DynamicCache(config=self._module.config)
            self._cache.layers = [
                _storing_in_blocks(number, layer, self._position_dims.get(number, 0))
                for number, layer in enumerate(self._cache.layers)
            ]
            holders: list[Any] = []
            for layer in self._cache.layers:
                layer.holders = holders
        for number, layer in enumerate(self._cache.layers):
            if isinstance(layer, _LayerInBlocks):
                layer.start_call(number, tokens, device)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                _reset_recurrent_layer(layer)
        return self._cache

    @torch.inference_mode()
    def record_layers(self) -> tuple[tuple[OwnLayer, ...], list[LayerState], list[int]]:
        """Run a few tokens and record the data that the cache layers store.

        Returns:
            The layers that store data per token, the states of recurrent layers, and the recurrent layers' indices in
                the cache.
        """
        recorded = _RecordingCache()
        device = next(self._module.parameters()).device
        ids = torch.arange(1, NUM_TOKENS + 1, device=device)
        cache = self._cache_for_call(recorded, device)
        with _tracking_modules(self._module, recorded):
            self._call(ids[None], cache, range(NUM_TOKENS))
        states, state_layers = [], []
        for number, layer in enumerate(cache.layers):
            positions = getattr(layer, "indexer_position_ids", None)
            self._position_dims[number] = 0 if positions is None else len(positions)
            if isinstance(layer, LinearAttentionCacheLayerMixin) and (state := tuple(_state(layer))):
                states.append(state)
                state_layers.append(number)
        self._cache, self.called = None, frozenset(recorded.called)
        if not recorded.parts and not states:
            raise BadInput("it keeps nothing of a token in transformers' cache")
        latents = {(1, rank) for rank in latent_ranks(self._module.config.get_text_config(decoder=True))}
        layers = tuple(
            OwnLayer(
                number,
                parts := tuple(sorted(recorded.parts[number], key=lambda part: _ORDER.index(part.name))),
                _window(cache.layers[number]),
                recorded.module_names[number],
                parts[0].shape[-1] if parts[0].shape in latents else 0,
            )
            for number in sorted(recorded.parts)
        )
        return layers, states, state_layers

    def _use_eager_attention(self) -> None:
        if self._module.config._attn_implementation != "eager":
            self._module.set_attn_implementation("eager")


NUM_TOKENS: Final = 5


def own_forward(module: nn.Module) -> OwnForward | None:
    own: OwnForward | None = getattr(module, _ATTRIBUTE, None)
    return own


def install_own_forward(module: nn.Module, reason: str) -> OwnForward:
    """Switch `module` to its own forward code. `reason`: why kvscope's attention cannot run. Raises the errors of
    `OwnForward`.
    """
    own = OwnForward(module, reason)
    setattr(module, _ATTRIBUTE, own)
    return own


def remove_own_forward(module: nn.Module) -> None:
    """Undo `install_own_forward`, for a model whose results turned out wrong."""
    if own_forward(module) is not None:
        delattr(module, _ATTRIBUTE)


def states_of(module: nn.Module) -> list[LayerState]:
    own = own_forward(module)
    return recurrent_layers(module).states if own is None else own.states


def accepts_cache(module: Any) -> bool:
    return _has_keyword(module, "past_key_values")


def _has_keyword(module: Any, name: str) -> bool:
    """Whether `forward` of the module or of its base model has a keyword `name`."""
    parts = {id(part): part for part in (module, module.base_model)}.values()
    return any(name in inspect.signature(part.forward).parameters for part in parts)


def _storing_in_blocks(number: int, layer: Any, position_dims: int) -> Any:
    """Return a copy of a cache layer that stores its data in blocks. Raises BadInput for unknown classes of layers."""
    if type(layer) not in _SUPPORTED_LAYERS:
        raise BadInput(f"its layer {number} keeps what is not known here ({type(layer).__name__})")
    if not isinstance(layer, CacheLayerMixin):
        return layer
    base_class: type = _IndexedLayerInBlocks if isinstance(layer, DynamicIndexedLayer) else _LayerInBlocks
    storing_layer: Any = object.__new__(
        type(type(layer).__name__, (base_class, type(layer)), {"position_dims": position_dims})
    )
    storing_layer.__dict__.update(layer.__dict__)
    return storing_layer


def _window(layer: Any) -> int:
    return int(layer.sliding_window) if getattr(layer, "is_sliding", False) else 0


def _reset_recurrent_layer(layer: Any) -> None:
    holders = layer.holders
    LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
    layer.holders = holders


def _state(layer: Any) -> Iterator[StatePart]:
    for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
        for index, tensor in states.items():
            if tensor is not None:
                yield StatePart(kind, index, tuple(tensor.shape[1:]), tensor.dtype)


class CallStates:
    """Moves the recurrent states of a call's sequences between their slots and a transformers `Cache`."""

    def __init__(self, batch: StateBatch, numbers: Sequence[int]) -> None:
        self._storage = batch.storage
        slots = [batch.slots[number] for number in numbers]
        self._slots = torch.tensor(slots, device=batch.storage.device)
        self._saves = [(place, save) for place, number in enumerate(numbers) for save in batch.saves.get(number, ())]
        self._is_alone = len(numbers) == 1

    @property
    def cuts(self) -> list[int]:
        """Batch rows before which a state is saved. A call must end before each of these rows."""
        return [row for _, (row, _) in self._saves]

    def load_into(self, cache: Any, layers: Sequence[int], states: Sequence[LayerState]) -> None:
        for number, (layer, state) in enumerate(zip(layers, states, strict=True)):
            cache_layer = cache.layers[layer]
            for part, tensor in zip(state, self._storage.layer(number), strict=True):
                value, index = tensor.index_select(0, self._slots), part.index
                cache_layer.has_previous_state[index] = True
                if part.kind == "conv":
                    cache_layer.conv_states[index], cache_layer.is_conv_states_initialized[index] = value, True
                    cache_layer.conv_kernel_size[index] = value.shape[-1]
                    cache_layer.device, cache_layer.dtype = value.device, value.dtype
                else:
                    cache_layer.recurrent_states[index], cache_layer.is_recurrent_states_initialized[index] = (
                        value,
                        True,
                    )

    def store_from(self, cache: Any, layers: Sequence[int], states: Sequence[LayerState], row: int) -> None:
        """Copy the states from `cache` to the sequences' slots after a call, and to the slots of `StateBatch.saves`.

        With a single sequence, the call's last token is the one before batch row `row`, and only the states to be saved
        before that row are saved. With several sequences, each has a single token.
        """
        saves = [(place, slot) for place, (at, slot) in self._saves if at == row or not self._is_alone]
        for number, (layer, state) in enumerate(zip(layers, states, strict=True)):
            cache_layer = cache.layers[layer]
            for part, tensor in zip(state, self._storage.layer(number), strict=True):
                states_of_part = (cache_layer.conv_states if part.kind == "conv" else cache_layer.recurrent_states)[
                    part.index
                ]
                tensor.index_copy_(0, self._slots, states_of_part)
                for place, slot in saves:
                    tensor[slot].copy_(states_of_part[place])


@contextmanager
def _tracking_modules(model: nn.Module, recorded: _RecordingCache) -> Iterator[None]:
    """Return a context that records the running modules, as a stack, and all modules that have been called, in
    `recorded`.
    """
    handles = []
    for name, submodule in model.named_modules():

        def enter(submodule: nn.Module, _: Any, name: str = name) -> None:
            recorded.running.append((name, submodule))
            recorded.called.add(submodule)

        def leave(*_: Any) -> None:
            recorded.running.pop()

        handles += [
            submodule.register_forward_pre_hook(enter),
            submodule.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
