"""Host memory: freed buffers are kept for reuse, and compiled products are bounded."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvscope_engine.model.layers.fused.packed_linear import can_pack
from kvscope_engine.model.platforms.host_allocator import keep_freed_memory

MANY_SHAPES = """
import torch
from kvscope_engine.model.platforms.host_allocator import limit_compiled_matmuls
from kvscope_engine.model.layers.fused.packed_linear import PackedLinear

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

limit_compiled_matmuls()
linears = [PackedLinear(torch.randn(out, 576).bfloat16(), None) for out in (576, 960, 3072)]
with torch.inference_mode():
    before = resident_mib()
    for count in range(1, 260):
        for linear in linears:
            linear(torch.zeros(count, 576, dtype=torch.bfloat16))
print(resident_mib() - before)
"""


def test_freed_memory_is_kept_with_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell its memory")
def test_host_memory_stays_bounded_after_matrix_products_of_many_sizes() -> None:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this CPU has no packed layers")
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, env=environment, check=True
    )
    assert float(done.stdout) < 250, "777 products of half a MiB each are 400 MiB"
