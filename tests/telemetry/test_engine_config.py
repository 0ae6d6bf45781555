"""Engine options: bounds, combinations, vLLM's `--speculative-config`, and one-line errors."""

from __future__ import annotations

import re

import pytest

from kvscope_telemetry.engine_config import EngineConfig, parse_speculative_config
from kvscope_telemetry.errors import BadInput


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "tpu"}, "device='tpu' is not accepted: must be one of auto, cpu, cuda"),
        ({"model": ""}, "model='' is not accepted: must be a name, a folder or a file"),
        ({"block_size": 0}, "block_size=0 is not accepted: must be a whole number from 1 to 1024"),
        ({"max_num_seqs": True}, "max_num_seqs=True is not accepted"),
        ({"max_num_seqs": 2.0}, "max_num_seqs=2.0 is not accepted"),
        ({"max_num_seqs": None}, "max_num_seqs=None is not accepted"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan is not accepted"),
        ({"cpu_offload_gb": -1.0}, "cpu_offload_gb=-1.0 is not accepted: must be a number of GiB from 0"),
        ({"kv_memory_bytes": 0}, "kv_memory_bytes=0 is not accepted"),
        ({"sparse_decode": 0.0}, "sparse_decode=0.0 is not accepted: must be a number above 0 and at most 1"),
        ({"preemption": "swap"}, "without host memory to swap to"),
        ({"allocator": "buddy", "enable_prefix_caching": True}, "leave out --enable-prefix-caching"),
        ({"tensor_parallel_size": 2, "page_heat": 4}, "page_heat=4 is not accepted with tensor_parallel_size=2"),
    ],
)
def test_invalid_option_or_combination_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        EngineConfig(**given)  # type: ignore[arg-type]


def test_zero_bytes_mean_no_host_tier() -> None:
    assert EngineConfig(host_kv_memory_bytes=0, kv_memory_bytes=None, sparse_decode=1).sparse_decode == 1


@pytest.mark.parametrize(
    ("rest", "shortest", "longest"),
    [
        ("", 5, 5),
        (', "prompt_lookup_max": 4', 4, 4),
        (', "prompt_lookup_min": 2', 2, 2),
        (', "prompt_lookup_max": 4, "prompt_lookup_min": 2', 2, 4),
    ],
)
def test_vllm_speculative_config_has_the_same_meaning(rest: str, shortest: int, longest: int) -> None:
    config = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 5' + rest + "}")
    assert (config.num_speculative_tokens, config.shortest, config.longest) == (5, shortest, longest)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngram", "a JSON object is expected"),
        ("{}", "field 'num_speculative_tokens' is missing"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens='0' is not accepted"),
        ('{"num_speculative_tokens": 5, "method": "eagle"}', "method='eagle' is not accepted"),
        ('{"num_speculative_tokens": 5, "draft_model": "x"}', "field 'draft_model' is not known"),
        (
            '{"num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 2}',
            "prompt_lookup_min=3 is not accepted",
        ),
    ],
)
def test_other_speculative_config_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_speculative_config(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
