"""The choice of implementation for each device, and what importing the package must not do."""

import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from tests.warm_python import WarmPython

from kvscope_kernels import Ops, ops_for
from kvscope_kernels.cpu.decode import paged_decode_attention_native
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.prefill import paged_prefill_attention_native
from kvscope_kernels.dispatch import _C, _C_REFUSALS, explain_ops, torch_ops
from kvscope_kernels.kv_write import kv_write_torch
from kvscope_kernels.operation_row import Operands
from kvscope_kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_torch
from kvscope_kernels.paged_prefill_attention import paged_prefill_attention_torch
from kvscope_kernels.third_party_attention.prefill_with_fallback import PrefillWithFallback


def test_kernels_for_cpu_and_cuda_are_different_implementations() -> None:
    cpu = ops_for("cpu")
    assert cpu.kv_write is kv_write_torch
    is_compiled = library() is not None
    assert cpu.prefill is (paged_prefill_attention_native if is_compiled else paged_prefill_attention_torch)
    assert cpu.decode is (paged_decode_attention_native if is_compiled else paged_decode_attention_torch)
    assert ops_for("cuda").decode is paged_decode_attention


def test_every_c_kernel_has_an_explanation_for_inputs_it_does_not_support() -> None:
    in_c = {field.name for field in fields(Ops) if getattr(_C, field.name) is not getattr(torch_ops(), field.name)}
    assert in_c == set(_C_REFUSALS)


def test_dispatch_names_the_attention_library_that_computes_prefill() -> None:
    ops = replace(
        ops_for("cpu"), prefill=PrefillWithFallback(SimpleNamespace(name="FlashInfer 1.0"), None, frozenset())
    )  # type: ignore[arg-type]
    rows = explain_ops(ops, Operands(torch.float32, torch.float32, 64, 64))
    assert rows["prefill"].implementation == "FlashInfer 1.0"
    assert {row.implementation for row in rows.values()} - {"FlashInfer 1.0"} <= {"C", "torch"}


def test_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device_type='mps' is not accepted: cpu or cuda"):
        ops_for("mps")


def test_kernel_package_works_without_triton() -> None:
    check_in_fresh_python(
        """
        import sys
        sys.modules["triton"] = None  # as if it was not installed
        import torch
        from kvscope_kernels import ops_for
        from kvscope_kernels.kv_write import kv_write
        new, k_cache, v_cache = torch.randn(1, 3, 4), torch.zeros(2, 4, 3, 4), torch.zeros(2, 4, 3, 4)
        arguments = new, new, k_cache, v_cache, torch.tensor([5])
        ops_for("cpu").kv_write(*arguments)
        assert torch.equal(k_cache[1, 1], new[0])
        for use in (lambda: ops_for("cuda"), lambda: kv_write(*arguments)):
            try:
                use()
            except RuntimeError as error:
                assert "pip install triton" in str(error), error
            else:
                raise AssertionError("nothing was raised")
        """
    )


def test_importing_the_kernels_does_not_initialize_cuda(warm_python: WarmPython) -> None:
    """The import of the engine does not either: the warm Python has imported it."""
    program = "import torch, kvscope_kernels as k; k.ops_for('cpu'); assert not torch.cuda.is_initialized()"
    run = warm_python.run(["-c", program])
    assert run.returncode == 0, run.stderr


def check_in_fresh_python(program: str) -> None:
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
