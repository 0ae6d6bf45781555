"""Digests of the KV blocks and logits of a deterministic engine, by which two runs are compared.

Determines which blocks a step filled, computes their digests, and defines how a finished request is recorded for
replay. Digesting a block of 16 tokens, 30 layers and 3 KV heads takes 0.2 ms. Knows neither recordings nor the
comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult
from kvscope_telemetry.block_texts.block_texts import AskedRequest, RecordedText
from kvscope_telemetry.ledger import pack_u4, pack_u8
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Fingerprints, TelemetryMessage

DIGEST_BYTES: Final = 8
_NOTHING: Final = bytes(DIGEST_BYTES)


class FingerprintRecorder:
    """Publishes digests of what each step computed. Called after the step ran and before its ended requests free their
    blocks.
    """

    def __init__(self, storage: KVStorage, epoch: int, publish: Callable[[TelemetryMessage], None]) -> None:
        self._storage = storage
        self._epoch = epoch
        self._publish = publish

    def record(self, plan: StepPlan, result: StepResult, step: int, now_ns: int) -> None:
        """Publish the digests of a step; nothing if it neither filled a block nor sampled a token."""
        filled = [(item.request, place) for item in plan.scheduled for place in self._filled(item)]
        sampled = [
            (item.request.number, len(item.request.output_token_ids) - len(tokens) + place, total)
            for item, tokens, sums in zip(plan.scheduled, result.token_ids, result.logit_sums, strict=False)
            for place, (_, total) in enumerate(zip(tokens, sums, strict=False))
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
                place=pack_u4([place for _, place in filled]),
                digests=self._digests(filled),
                sampled_number=pack_u4([number for number, _, _ in sampled]),
                sampled_place=pack_u4([place for _, place, _ in sampled]),
                logit_sums=pack_u8([total for _, _, total in sampled]),
            )
        )

    def _filled(self, item: Scheduled) -> range:
        size = self._storage.block_size
        return range(item.start // size, (item.start + item.num_tokens) // size)

    def _digests(self, filled: Sequence[tuple[Request, int]]) -> bytes:
        """Return the digests of the blocks, row-major of shape (blocks, layers), `DIGEST_BYTES` each."""
        if not filled:
            return b""
        layers = [self._of_layer(layer, filled) for layer in range(len(self._storage.layers))]
        return b"".join(b"".join(of_block) for of_block in zip(*layers, strict=True))

    def _of_layer(self, layer: int, filled: Sequence[tuple[Request, int]]) -> list[bytes]:
        kv = self._storage.layer(layer)
        if kv.is_shared:
            return [_NOTHING] * len(filled)
        blocks = [request.block_tables[kv.group][place] for request, place in filled]
        is_held = [place >= request.num_null_blocks[kv.group] for request, place in filled]
        places = [block if held else 0 for block, held in zip(blocks, is_held, strict=True)]
        where = torch.tensor(places, device=kv.k.device)
        keys, values = (part.index_select(0, where).cpu().view(torch.uint8).numpy() for part in (kv.k, kv.v))
        return [
            _digest(key.data, value.data) if held else _NOTHING
            for key, value, held in zip(keys, values, is_held, strict=True)
        ]


def _digest(keys: memoryview, values: memoryview) -> bytes:
    digest = hashlib.blake2b(keys, digest_size=DIGEST_BYTES)
    digest.update(values)
    return digest.digest()


def recorded_request(request: Request, epoch: int) -> RecordedText:
    """Convert a finished request to its form in a recording with texts."""
    asked = request.sampling
    said = {name: getattr(asked, name) for name in SamplingParams.__struct_fields__}
    return RecordedText(
        epoch=epoch,
        block=-1,
        owner=request.number,
        number=request.number,
        token_ids=(*request.prompt_token_ids, *request.output_token_ids),
        request=AskedRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=SamplingParams(
                **said
                | {"n": 1, "max_tokens": request.max_tokens, "min_tokens": min(asked.min_tokens, request.max_tokens)}
            ),
            finish_reason=request.finish_reason or "",
            index=request.index,
            priority=request.priority,
            cache_salt=request.cache_salt,
        ),
    )
