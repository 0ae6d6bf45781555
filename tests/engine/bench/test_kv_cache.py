"""Measures of the quality of a quantized cache."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import pytest
import torch

from kvscope_engine.bench import kv_cache, perplexity
from kvscope_engine.bench.workloads import sample_text
from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput


@pytest.fixture
def loaded(tiny_model: Callable[..., str]) -> LoadedModel:
    return load_model(EngineConfig(model=tiny_model(), device="cpu", dtype="float32"), lambda progress: None)


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 60])
def test_perplexity_equals_that_of_the_whole_text(
    loaded: LoadedModel, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 tokens through the cache, compared with transformers' eager attention."""
    monkeypatch.setattr(perplexity, "CHUNK_TOKENS", 16)
    ids = torch.randint(3, 256, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    found = perplexity.perplexity(loaded, ids.tolist(), "auto")
    loaded.module.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.inference_mode():
        logits = loaded.module(input_ids=ids[None], use_cache=False).logits[0]
    loaded.module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    expected = math.exp(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item())
    assert found == pytest.approx(expected, rel=1e-4)


def test_quantized_cache_changes_the_perplexity(loaded: LoadedModel) -> None:
    ids = torch.randint(3, 256, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    plain, int8, fp8 = (perplexity.perplexity(loaded, ids, name) for name in ("auto", "int8", "fp8"))
    assert len({plain, int8, fp8}) == 3
    assert int8 == pytest.approx(plain, rel=0.05)
    assert fp8 == pytest.approx(plain, rel=0.2)


def test_answer_agreement_counts_equal_tokens_up_to_the_first_difference() -> None:
    expected = [(1, 2, 3, 4), (5, 6), (7, 8), ()]
    found = [(1, 2, 9, 4), (5, 6), (7,), ()]
    assert kv_cache.agreement(expected, found) == {
        "num_equal_answers": 2,
        "num_answers": 4,
        "equal_tokens_share": (2 + 2 + 1) / 8,
    }


def test_sample_text_is_included() -> None:
    text = sample_text()
    assert text.startswith("I HAD always thought Jack Gisburn rather a cheap genius")
    assert 1800 < len(text.split()) < 2200
    assert text.isascii()


def test_kv_cache_benchmark_refuses_a_single_token() -> None:
    with pytest.raises(BadInput, match="--tokens 1 is not accepted"):
        kv_cache.run(argparse.Namespace(tokens=1))


def test_model_without_a_tokenizer_is_refused(tiny_model: Callable[..., str]) -> None:
    options = {"model": tiny_model(), "device": "cpu", "dtype": "float32", "tokens": None, "json": True}
    with pytest.raises(BadInput, match="has no tokenizer"):
        kv_cache.run(argparse.Namespace(**options))
