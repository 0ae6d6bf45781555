"""The proof at load that paged attention gives what transformers' eager attention gives.

Owns one short comparison: all tokens at once and eager, against two pieces (a prefill and a decode) through the
block pool. A model that takes positions, masks or caches from elsewhere fails it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.running.attention import ATTENTION_NAME, DecodeBatch, PagedContext, PrefillBatch
from kvscope_engine.model.running.kv_storage import KVStorage, LayerShape
from kvscope_kernels import ops_for
from kvscope_telemetry.errors import BadInput

NUM_TOKENS: Final = 7
BLOCK_SIZE: Final = 16
TOLERANCE: Final = {torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE: Final = 0.3
"""Share of the logits' spread by which the root mean square may differ. In 16 bits an expert may be chosen
differently; a wrong position or mask shifts logits by far more."""


def check_equals_eager(module: nn.Module, layers: Sequence[LayerShape]) -> None:
    """Raises BadInput when the last logits differ."""
    parameter = next(module.parameters())
    ids = _token_ids(module, parameter.device)
    with torch.inference_mode():
        expected = _eager_logits(module, ids)
        actual = _paged_logits(module, ids, layers, parameter.dtype)
    spread = float(expected.std()) or 1.0
    difference = float((actual - expected).square().mean().sqrt()) / spread
    if not difference <= TOLERANCE.get(parameter.dtype, LOW_PRECISION_TOLERANCE):
        raise BadInput(
            f"paged attention does not give what eager attention gives ({difference:.3g} of the logits' spread)"
        )


def _token_ids(module: nn.Module, device: torch.device) -> torch.Tensor:
    """Some different tokens, the same for each run."""
    config: Any = module.config
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    return (torch.arange(1, NUM_TOKENS + 1, device=device) * 37 + 11) % vocabulary


def _eager_logits(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        logits: torch.Tensor = module(input_ids=ids[None], use_cache=False).logits
    finally:
        module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    return logits[0, -1].float()


def _paged_logits(
    module: nn.Module, ids: torch.Tensor, layers: Sequence[LayerShape], dtype: torch.dtype
) -> torch.Tensor:
    storage = KVStorage(2, BLOCK_SIZE, layers, dtype, ids.device)
    last = NUM_TOKENS - 1
    _run(module, ids[:last], 0, storage)
    return _run(module, ids[last:], last, storage)[0, -1].float()


def _run(module: nn.Module, ids: torch.Tensor, start: int, storage: KVStorage) -> torch.Tensor:
    positions = torch.arange(start, start + len(ids), device=ids.device)
    tables = torch.ones(1, 1, dtype=torch.int32, device=ids.device)
    length = start + len(ids)
    seq_lens = torch.tensor([length], dtype=torch.int32, device=ids.device)
    query_start = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
    is_decode = len(ids) == 1
    context = PagedContext(
        storage=storage,
        ops=ops_for(ids.device.type),
        slot_mapping=positions + BLOCK_SIZE,
        num_single_token=int(is_decode),
        decode=DecodeBatch(tables, seq_lens, length) if is_decode else None,
        prefill=None if is_decode else PrefillBatch(tables, seq_lens, length, query_start, len(ids)),
    )
    logits: torch.Tensor = module(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=context
    ).logits
    return logits
