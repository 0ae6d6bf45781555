"""The table of operations names what a runner uses: calls of C functions are counted, linear layers inspected."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine.cli.main import main
from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.layers.fused.int8_linear import Int8Linear
from kvscope_engine.model.layers.fused.packed_linear import FusedLinear, PackedLinear
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.runner import operation_table as table
from kvscope_engine.model.runner import product_choice
from kvscope_kernels import ops_for
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.library import library
from kvscope_kernels.dispatch import torch_ops
from kvscope_kernels.operation_row import Operands, OperationChoice
from kvscope_telemetry.engine_config import EngineConfig

CPU = torch.device("cpu")
C_FUNCTIONS = {
    "decode attention": "kvscope_decode",
    "prefill attention": "kvscope_prefill",
    "rotary embedding and KV write": "kvscope_rotate_write",
    "RMSNorm": "kvscope_rms_norm",
    "gated activation": "kvscope_gate",
}
PLAIN = Operands(torch.float32, torch.float32, 64, 64)

Load = Callable[..., LoadedModel]
needs_library = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@pytest.fixture
def c_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of C functions by name."""
    calls: Counter[str] = Counter()
    found: Any = library()

    def count(name: str, function: Any) -> Callable[..., int]:
        def counted(*arguments: Any) -> int:
            calls[name] += 1
            result: int = function(*arguments)
            return result

        return counted

    for name in (*C_FUNCTIONS.values(), "kvscope_layer") if found is not None else ():
        monkeypatch.setattr(found, name, count(name, getattr(found, name)))
    return calls


@pytest.fixture
def load_tiny(tiny_loaded: Load, tmp_path: Path) -> Load:
    """Function that loads a tiny Llama with engine options."""

    def load(head_dim: int = 16, **options: Any) -> LoadedModel:
        tiny_loaded("llama", head_dim=head_dim)
        return load_model(
            EngineConfig(model=f"dummy:{tmp_path / 'llama.json'}", device="cpu", **options), lambda _: None
        )

    return load


def run_prompt_and_decodes(planned: Any, loaded: LoadedModel, calls: Counter[str], **options: Any) -> Any:
    """Run one request and return the run; `calls` counts its steps only, not the checks at load."""
    run = planned(loaded, **options)
    calls.clear()
    run.add([5, 6, 7, 8, 9], 4, logprobs=None)
    run.run()
    return run


def used(calls: Counter[str]) -> dict[str, str]:
    return {operation: "C" if calls[name] else "torch" for operation, name in C_FUNCTIONS.items()}


def linear_of(module: torch.nn.Module) -> str:
    kinds = {type(part) for part in module.modules()} & {PackedLinear, FusedLinear}
    assert len(kinds) == 1, "linear layers of one kind"
    return "oneDNN" if PackedLinear in kinds else "torch"


def test_doctor_names_what_a_loaded_model_runs_on(
    load_tiny: Load, planned: Any, c_calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["operations"]
    told = {row["operation"]: row["implementation"] for row in printed["rows"]}
    loaded = load_tiny(dtype="auto")
    run = run_prompt_and_decodes(planned, loaded, c_calls)
    assert printed["title"].startswith(f"Operations on cpu in {str(loaded.dtype).removeprefix('torch.')},")
    assert {operation: told[operation] for operation in C_FUNCTIONS} == used(c_calls)
    assert told["linear"] == linear_of(loaded.module)
    assert run.runner.fused.experts == 0
    assert told["experts"] == "transformers"


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "head_dim"),
    [
        ("float32", "auto", 16),
        ("bfloat16", "auto", 16),
        ("float16", "auto", 16),
        ("float32", "int8", 16),
        ("float32", "auto", 8),
    ],
)
def test_operation_table_names_the_kernels_that_really_run_for_each_dtype_and_head_size(
    dtype: str, kv_cache_dtype: str, head_dim: int, load_tiny: Load, planned: Any, c_calls: Counter[str]
) -> None:
    loaded = load_tiny(head_dim, dtype=dtype)
    run = run_prompt_and_decodes(planned, loaded, c_calls, kv_cache_dtype=kv_cache_dtype)
    operands = Operands(loaded.dtype, run.storage.dtype, head_dim, head_dim)
    told = {row.operation: row for row in table.operation_table(CPU, ops_for("cpu"), operands)}
    assert {operation: told[operation].implementation for operation in C_FUNCTIONS} == used(c_calls)
    assert told["linear"].implementation == linear_of(loaded.module)
    assert all(row.reason for row in told.values())


@needs_library
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_operation_table_names_the_kernel_that_multiplies_quantized_weights(
    quantization: str, load_tiny: Load, planned: Any, c_calls: Counter[str]
) -> None:
    loaded = load_tiny(dtype="float32", quantization=quantization)
    run_prompt_and_decodes(planned, loaded, c_calls)
    told = {row.operation: row.implementation for row in table.operation_table(CPU, ops_for("cpu"), PLAIN)}
    parts = [part for part in loaded.module.modules() if isinstance(part, Int8Linear | GroupedLinear)]
    assert parts
    in_c = all(isinstance(part, Int8Linear) or isinstance(part.grouped, NativeGrouped) for part in parts)
    assert (told[f"{quantization} linear"] == "C") is in_c
    assert (told["whole decoder layer"] == "C") is (c_calls["kvscope_layer"] > 0)


def row_of(operation: str, device: torch.device = CPU, **changes: Any) -> OperationChoice:
    rows = table.operation_table(device, ops_for(device.type), PLAIN._replace(**changes))
    return next(row for row in rows if row.operation == operation)


@needs_library
def test_operation_table_states_why_the_c_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    half = row_of("RMSNorm", dtype=torch.float16, cache_dtype=torch.float16)
    assert half == OperationChoice("RMSNorm", "torch", "C does not compute in float16")
    assert (
        row_of("decode attention", cache_dtype=torch.int8).reason
        == "C does not convert between float32 and a cache in int8"
    )
    assert row_of("decode attention", head_dim=40).reason.startswith("C needs heads whose sizes are multiples of 16")
    assert row_of("block copies").reason == "there is no C implementation"
    assert row_of("fp8 linear").implementation == "refused"
    monkeypatch.setattr("kvscope_kernels.cpu.library.library", lambda: None)
    monkeypatch.setenv("KVSCOPE_NATIVE", "0")
    rows = {row.operation: row for row in table.operation_table(CPU, torch_ops(), PLAIN)}
    assert rows["decode attention"] == OperationChoice("decode attention", "torch", "KVSCOPE_NATIVE=0 is set")
    assert rows["whole decoder layer"].reason == "KVSCOPE_NATIVE=0 is set"


@needs_library
@pytest.mark.parametrize(("rows", "text"), [(0, ""), (5, "; AMX tiles from 5 rows on, with the same bits")])
def test_operation_table_names_the_rows_from_which_tiles_multiply_weights_as_stored(
    rows: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "min_tile_rows", lambda: rows)
    operation = "linear with weights as stored"
    assert row_of(operation, dtype=torch.bfloat16).reason == f"compiled for this CPU{text}"
    assert row_of(operation).reason == "compiled for this CPU"


@pytest.mark.parametrize(("capability", "linear"), [(90, "Triton"), (89, "timed at load")])
def test_operation_table_of_a_gpu_names_triton_or_torch_for_each_operation(
    capability: int, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run: the choices are only queried."""
    monkeypatch.setattr(product_choice, "compute_capability", lambda _: capability)
    monkeypatch.setattr("kvscope_kernels.quantized_linear.fp8.compute_capability", lambda _: capability)
    gpu = torch.device("cuda")
    assert row_of("decode attention", gpu).implementation == "Triton"
    assert row_of("experts", gpu).implementation == "Triton"
    assert row_of("int4 linear", gpu).implementation == "Triton"
    assert row_of("fp8 linear", gpu).implementation == "torch"
    assert row_of("linear", gpu).implementation == linear
    assert row_of("prefill attention", gpu).implementation == "Triton"
    monkeypatch.setattr(table, "importable", lambda: ("FlashInfer 1.0",))
    assert row_of("prefill attention", gpu).reason == "Triton or FlashInfer 1.0, whichever is faster"
