"""A whole engine on a GPU is compared with transformers on that GPU, for all options and under memory pressure.

The rule for near ties: each token of the engine must be the likeliest by transformers' own eager attention over the
tokens before it, or within `NEAR` of the likeliest, as a share of the row's largest logit. Of the tokens, a share of
`EXACT` are the likeliest themselves. Each token is judged after its own predecessors, so one near tie spoils no other.

`KVSCOPE_GPU_REHEARSAL=1` runs the same tests on the CPU: it shows that they run, not that a GPU is right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.gpu_notes import faults_in
from tests.engine.lora_folder import merged, write_adapter
from tests.engine.recurrent_models import FAMILIES
from tests.engine.recurrent_models import SIZES as RECURRENT_SIZES

from kvscope_engine import Engine, EngineConfig
from kvscope_engine import engine as engine_module
from kvscope_engine.completion import Completion
from kvscope_engine.model.layers.attention.sparse import page_choice
from kvscope_telemetry.engine_config import LoraModule, SpeculativeConfig
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]
REHEARSAL = bool(os.environ.get("KVSCOPE_GPU_REHEARSAL"))
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that every token depends on the ones before it
    "eos_token_id": 2,
}
PROMPTS = [tuple((7 * index + 3 * place) % 250 + 3 for place in range(5 + 11 * index)) for index in range(6)]
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NEAR = {"float32": 1e-4, "bfloat16": 3e-2}
EXACT = {"float32": 0.99, "bfloat16": 0.9}
QUANTIZED_NEAR, QUANTIZED_EXACT = 0.3, 0.5
FOUR_BITS_NEAR, FOUR_BITS_EXACT = 1.0, 0.3  # by chance, one token in 256 would match
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SWAPPING: dict[str, Any] = {
    "num_gpu_blocks_override": 12,
    "kv_memory_bytes": None,
    "host_kv_memory_bytes": 16 << 20,
    "preemption": "swap",
}


@pytest.fixture(scope="module")
def device() -> str:
    if not (REHEARSAL or torch.cuda.is_available()):
        pytest.skip("needs a CUDA device")
    torch.set_float32_matmul_precision("highest")
    return "cpu" if REHEARSAL else "cuda"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with its weights: random weights of two devices would differ."""
    return save_model(tmp_path_factory.mktemp("tiny"), "llama")


def save_model(path: Path, architecture: str, **sizes: Any) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(architecture, **SIZES | sizes)
    auto.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def assert_matches_transformers(device: str, folder: str) -> Callable[..., None]:
    """Function that compares completions with transformers by the rule above: `assert_matches_transformers(found,
    dtype, …)`.
    """

    def compare(
        found: list[Completion],
        dtype: str,
        near: float | None = None,
        exact: float | None = None,
        of: str = folder,
    ) -> None:
        shares, distances = [], []
        model = transformers_model(of, dtype, device)
        for completion, prompt in zip(found, PROMPTS, strict=True):
            assert len(completion.token_ids) == NUM_TOKENS, completion.error
            logits = next_logits(model, prompt, completion.token_ids, device)
            top = logits.amax(-1)
            given = logits.gather(-1, torch.tensor(completion.token_ids, device=device)[:, None])[:, 0]
            distances.append(((top - given) / logits.abs().amax(-1)).max().item())
            shares.append((top == given).float().mean().item())
        share = sum(shares) / len(shares)
        print(f"{dtype}: {share:.1%} are the likeliest, the others within {max(distances):.2g} of it")
        assert max(distances) <= (NEAR[dtype] if near is None else near)
        assert share >= (EXACT[dtype] if exact is None else exact)

    return compare


def transformers_model(folder: str, dtype: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.to(device).eval()


def next_logits(model: Any, prompt: tuple[int, ...], output: list[int], device: str) -> torch.Tensor:
    """Return float32 logits (tokens of the output, vocabulary) of transformers for each output token."""
    ids = torch.tensor([[*prompt, *output]], device=device)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def run_engine(
    folder: str, device: str, sampling: SamplingParams = GREEDY, **options: Any
) -> tuple[list[Completion], Engine]:
    """Return the completions of all prompts submitted at once, and the closed engine."""
    config = EngineConfig(
        **{"model": folder, "device": device, "dtype": "float32", "kv_memory_bytes": 32 << 20} | options
    )
    submits = [Submit(request_id="-", prompt_token_ids=prompt, sampling=sampling) for prompt in PROMPTS]
    with Engine(config) as engine:
        assert faults_in(engine.notes) == [], "graphs are captured, host memory is pinned"
        return list(engine.generate(submits)), engine


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_tokens_equal_transformers_with_graphs_and_eager(
    device: str, folder: str, assert_matches_transformers: Any, dtype: str, enforce_eager: bool
) -> None:
    found, _ = run_engine(folder, device, dtype=dtype, enforce_eager=enforce_eager)
    assert_matches_transformers(found, dtype)


@pytest.mark.parametrize(
    ("architecture", "sizes", "num_joined"),
    [
        ("qwen2", {}, 2),  # biases
        ("qwen3", {"head_dim": 32}, 2),  # norms of queries and keys
        ("mistral", {"sliding_window": 16, "head_dim": 80}, 2),  # a head size that is no power of two
        ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}, 0),
        ("gemma3_text", {"sliding_window": 16}, 0),
        ("stablelm", {"partial_rotary_factor": 0.5}, 0),
    ],
)
def test_tokens_of_other_architectures_equal_transformers(
    device: str,
    assert_matches_transformers: Any,
    tmp_path: Path,
    architecture: str,
    sizes: dict[str, Any],
    num_joined: int,
) -> None:
    """The tokens are equal whether or not layers are fused."""
    folder = save_model(tmp_path / architecture, architecture, **sizes)
    with Engine(EngineConfig(model=folder, device=device, dtype="float32", kv_memory_bytes=32 << 20)) as engine:
        assert engine.components.runner.fused.layers == num_joined
        submits = [Submit(request_id="-", prompt_token_ids=prompt, sampling=GREEDY) for prompt in PROMPTS]
        assert_matches_transformers(list(engine.generate(submits)), "float32", of=folder)


RECURRENT = RECURRENT_SIZES | {"vocab_size": 256}
SHAPES: dict[str, dict[str, Any]] = {
    **{family: RECURRENT | FAMILIES[family] for family in ("qwen3_next", "granitemoehybrid", "lfm2", "mamba2", "rwkv")},
    "youtu": LATENTS,
    "deepseek_v32": LATENTS | {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
}
"""Models with recurrent states, MLA, an indexer and ALiBi."""


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("architecture", SHAPES)
def test_tokens_of_other_cache_layouts_equal_transformers(
    device: str, assert_matches_transformers: Any, tmp_path: Path, architecture: str, enforce_eager: bool
) -> None:
    """Decode graphs run while the batch shrinks, and the second round finds the prompts in the prefix cache."""
    folder = save_model(tmp_path / architecture, architecture, **SHAPES[architecture])
    config = EngineConfig(
        model=folder,
        device=device,
        dtype="float32",
        kv_memory_bytes=32 << 20,
        enforce_eager=enforce_eager,
        state_interval=16,
    )
    submits = [Submit(request_id="-", prompt_token_ids=prompt, sampling=GREEDY) for prompt in PROMPTS]
    with Engine(config) as engine:
        for _ in range(2):
            assert_matches_transformers(list(engine.generate(submits)), "float32", of=folder)


def test_tokens_with_adapters_equal_merged_weights(
    device: str, folder: str, assert_matches_transformers: Any, tmp_path: Path
) -> None:
    """One batch has requests for two adapters and for none; steps with adapters run without graphs."""
    model = transformers_model(folder, "float32", "cpu")
    folders = {"": folder}
    for seed, name in enumerate(("sql", "python"), 1):
        write_adapter(tmp_path / name, model, seed=seed)
        folders[name] = str(tmp_path / f"{name}-merged")
        merged(model, tmp_path / name).save_pretrained(folders[name])
    modules = tuple(LoraModule(name=name, path=str(tmp_path / name)) for name in folders if name)
    config = EngineConfig(model=folder, device=device, dtype="float32", kv_memory_bytes=32 << 20, lora_modules=modules)
    with Engine(config) as engine:
        asked = [
            Submit(request_id="-", prompt_token_ids=prompt, sampling=GREEDY, adapter=name)
            for prompt in PROMPTS
            for name in folders
        ]
        found = list(engine.generate(asked))
    for number, of in enumerate(folders.values()):
        assert_matches_transformers(found[number :: len(folders)], "float32", of=of)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_tokens_with_swaps_equal_transformers(
    device: str, folder: str, assert_matches_transformers: Any, enforce_eager: bool
) -> None:
    found, engine = run_engine(folder, device, enforce_eager=enforce_eager, **SWAPPING)
    stats = engine.components.mover.stats
    assert stats is not None
    assert stats.saved_bytes > 0, "nothing was swapped out"
    assert stats.loaded_bytes > 0, "nothing was swapped in"
    assert_matches_transformers(found, "float32")


def test_tokens_with_a_disk_tier_equal_transformers(
    device: str, folder: str, assert_matches_transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tier is so small that blocks go on to disk."""
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    found, engine = run_engine(
        folder, device, **SWAPPING | {"host_kv_memory_bytes": 6 * 8192, "disk_kv_memory_bytes": 16 << 20}
    )
    stats = engine.components.mover.stats
    assert stats is not None
    assert stats.disk_written_bytes > 0
    assert_matches_transformers(found, "float32")


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_eight_bit_cache_changes_few_tokens(
    device: str, folder: str, assert_matches_transformers: Any, kv_cache_dtype: str
) -> None:
    found, _ = run_engine(folder, device, kv_cache_dtype=kv_cache_dtype)
    assert_matches_transformers(found, "float32", QUANTIZED_NEAR, QUANTIZED_EXACT)


def test_eight_bit_weights_change_few_tokens(device: str, folder: str, assert_matches_transformers: Any) -> None:
    found, engine = run_engine(folder, device, quantization="int8")
    assert engine.hello.model.quantization == "int8"
    assert_matches_transformers(found, "float32", QUANTIZED_NEAR, QUANTIZED_EXACT)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_four_bit_weights_change_not_all_tokens(
    device: str, folder: str, assert_matches_transformers: Any, enforce_eager: bool
) -> None:
    found, engine = run_engine(folder, device, quantization="int4", enforce_eager=enforce_eager)
    assert engine.hello.model.quantization == "int4"
    assert_matches_transformers(found, "float32", FOUR_BITS_NEAR, FOUR_BITS_EXACT)


@pytest.mark.parametrize("piecewise_graphs", [None, False], ids=["prompts in graphs", "prompts without graphs"])
def test_prefill_graphs_do_not_change_the_tokens(
    device: str, folder: str, assert_matches_transformers: Any, piecewise_graphs: bool | None
) -> None:
    """Every step with a prefill uses one from the first step on, and no notice reports a failed capture."""
    published: list[Any] = []
    config = EngineConfig(
        model=folder,
        device=device,
        dtype="float32",
        kv_memory_bytes=32 << 20,
        piecewise_graphs=piecewise_graphs,
        max_num_batched_tokens=64,
    )
    submits = [Submit(request_id="-", prompt_token_ids=prompt, sampling=GREEDY) for prompt in PROMPTS]
    with Engine(config, publish=published.append) as engine:
        assert_matches_transformers(list(engine.generate(submits)), "float32")
        engine.while_idle()
        assert faults_in(engine.notes) == []
    works = [message.work for message in published if getattr(message, "work", None) is not None]
    sizes = [work.graph_tokens for work in works if work.graph_tokens]
    assert bool(sizes) == (piecewise_graphs is None and not REHEARSAL)
    assert set(sizes) <= {16, 32, 64}
    assert not sizes or works[0].graph_tokens == 64, "a step waited for a capture"


def test_seeded_tokens_do_not_depend_on_the_batch(device: str, folder: str) -> None:
    """Requests with every filter run in a batch with greedy ones, and alone."""
    wanted = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=place, **options)
        for place, options in enumerate(
            ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.5}, {})
        )
    ]
    submits = [
        Submit(request_id="-", prompt_token_ids=prompt, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, wanted, strict=True)
    ]
    config = EngineConfig(model=folder, device=device, dtype="float32", kv_memory_bytes=32 << 20)
    with Engine(config) as engine:
        together = [completion.token_ids for completion in engine.generate(submits)]
        assert [completion.token_ids for completion in engine.generate(submits)] == together
        alone = [next(iter(engine.generate([submit]))).token_ids for submit in submits]
    same = [mine == all_of_them for mine, all_of_them in zip(alone, together, strict=True)]
    assert sum(same) >= len(same) - 1, "more than one near tie differs with the batch size"


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_speculative_decoding_does_not_change_the_tokens(
    device: str, folder: str, assert_matches_transformers: Any, enforce_eager: bool
) -> None:
    guesses = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
    found, _ = run_engine(folder, device, speculative_config=guesses, enforce_eager=enforce_eager)
    assert_matches_transformers(found, "float32")


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_sparse_decode_with_all_blocks_equals_full_attention(
    device: str, assert_matches_transformers: Any, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block bounds are written, blocks are scored and their table is made; a run with half of the blocks finishes as
    well.
    """
    monkeypatch.setattr(page_choice, "MIN_TOKENS", 4)
    deep = save_model(tmp_path / "deep", "llama", num_hidden_layers=4)  # the first two layers use full attention
    found, _ = run_engine(deep, device, sparse_decode=1.0, enforce_eager=enforce_eager)
    assert_matches_transformers(found, "float32", of=deep)
    found, _ = run_engine(deep, device, sparse_decode=0.5, enforce_eager=enforce_eager)
    assert all(len(completion.token_ids) == NUM_TOKENS for completion in found)


def test_attention_shares_are_the_same_with_graphs(device: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is measured; the first one, which has no output token yet, agrees up to the order of sums."""
    runs = []
    for enforce_eager in (True, False):
        seen: list[Any] = []

        def keeping(pool: Any, plan: Any, shares: Any, step: int, seen: list[Any] = seen) -> None:
            seen.append(shares[0].copy())

        monkeypatch.setattr(engine_module, "store_attention", keeping)
        run_engine(folder, device, page_heat=1, enforce_eager=enforce_eager)
        runs.append(seen)
    (eager, *_), (graphs, *_) = runs
    width = min(eager.shape[1], graphs.shape[1])
    assert abs(eager[:, :width] - graphs[:, :width]).max() < 1e-3
    for shares in runs[0] + runs[1]:
        assert abs(shares.sum(1) - 1.0).max() < 1e-3


def test_shared_blocks_are_copied_before_they_are_written(device: str, folder: str) -> None:
    """Three completions of one prompt share its last block until the first token."""
    prompt, sampling = PROMPTS[2][:20], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)
    config = EngineConfig(model=folder, device=device, dtype="float32", kv_memory_bytes=32 << 20)
    with Engine(config) as engine:
        found = list(engine.generate([Submit(request_id="-", prompt_token_ids=prompt, sampling=sampling)]))
    assert len(found) == 3
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids


def test_log_probabilities_equal_transformers(device: str, folder: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    found, _ = run_engine(folder, device, sampling)
    model = transformers_model(folder, "float32", device)
    for completion, prompt in zip(found, PROMPTS, strict=True):
        wanted = next_logits(model, prompt, completion.token_ids, device).log_softmax(-1).cpu()
        for row, token, said in zip(wanted, completion.token_ids, completion.logprobs, strict=True):
            assert said.logprob == pytest.approx(row[token].item(), abs=1e-3)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 5, "top_p": 0.9, "logprobs": 2}], ids=str)
def test_async_scheduling_gives_the_same_tokens(
    device: str, folder: str, options: dict[str, Any], enforce_eager: bool
) -> None:
    """The same batches run in the same order, so all tokens are equal."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    said = []
    for overlaps in (True, False):
        found, engine = run_engine(folder, device, sampling, async_scheduling=overlaps, enforce_eager=enforce_eager)
        said.append([completion.token_ids for completion in found])
        assert (engine.overlaps.overlapped > NUM_TOKENS // 2) == overlaps, engine.overlaps
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"min_tokens": 5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logprobs": 2},
    ],
    ids=str,
)
def test_sampling_on_gpu_equals_the_cpu(device: str, folder: str, options: dict[str, Any]) -> None:
    """The same seed gives the same random numbers; the last bit may change a draw and what follows it."""
    sampling = SamplingParams(seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    here, there = (run_engine(folder, name, sampling)[0] for name in (device, "cpu"))
    same = [one.token_ids == other.token_ids for one, other in zip(here, there, strict=True)]
    assert sum(same) >= len(same) - 1


def test_no_kernel_is_compiled_after_start(device: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton calls its hook whenever it compiled a kernel or read one from its cache."""
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **seen: compiled.append(str(seen.get("repr")))
    )
    config = EngineConfig(model=folder, device=device, kv_memory_bytes=32 << 20)
    submits = [Submit(request_id="-", prompt_token_ids=prompt, sampling=GREEDY) for prompt in PROMPTS]
    with Engine(config) as engine:
        known = len(compiled)
        assert len(list(engine.generate(submits))) == len(PROMPTS)
    assert compiled[known:] == []


def test_blocks_take_the_rest_of_the_memory_share(device: str, tmp_path: Path) -> None:
    """The heads are so wide that half of the memory of a GPU has a usual number of blocks."""
    wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 4}
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SIZES | wide))
    with Engine(EngineConfig(model=f"dummy:{config_file}", device=device, gpu_memory_utilization=0.5)) as engine:
        memory = engine.memory()
        assert memory.weights_bytes > 0
        if device == "cuda":
            total = torch.cuda.mem_get_info()[1]
            assert 0.4 * total <= memory.kv_bytes <= 0.5 * total
            assert torch.cuda.memory_reserved() <= 0.5 * total
