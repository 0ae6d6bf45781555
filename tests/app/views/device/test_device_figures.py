"""Tests of the texts and numbers of the devices view."""

from __future__ import annotations

import pytest

from kvscope_app.views.device.device_figures import gpu_figures, gpu_state
from kvscope_app.views.device.memory_users import MAX_NAMED, gpu_memory_users, host_memory_users
from kvscope_telemetry.messages.devices import Gpu, GpuProcess, Host, HostProcess

GIB = 1 << 30
PROCESS = HostProcess(pid=5, name="engine", anonymous_bytes=2 * GIB, file_bytes=GIB, shared_bytes=0, cores=1.5)
HOST = Host(
    name="A Processor",
    memory_total_bytes=16 * GIB,
    memory_available_bytes=10 * GIB,
    cores=(0.25, 0.75),
    swap_total_bytes=0,
    swap_used_bytes=0,
    processes=(PROCESS,),
)


def test_memory_bar_pieces_sum_to_the_used_memory():
    processes = tuple(GpuProcess(pid=pid, used_bytes=pid * GIB) for pid in range(1, 10))
    gpu = Gpu(
        index=0,
        memory_total_bytes=80 * GIB,
        memory_free_bytes=20 * GIB,
        memory_reserved_bytes=GIB,
        processes=processes,
    )
    pieces = gpu_memory_users(gpu)
    assert sum(piece.num_bytes for piece in pieces) == 60 * GIB
    assert [piece.color_index for piece in pieces[:MAX_NAMED]] == list(range(MAX_NAMED))
    assert pieces[MAX_NAMED].label == "3 more processes"
    assert pieces[-1].label == "no process reported"
    assert sum(piece.num_bytes for piece in host_memory_users(HOST)) == 6 * GIB
    assert gpu_memory_users(Gpu(index=0)) == host_memory_users(Host()) == []


@pytest.mark.parametrize(
    ("gpu", "state"),
    [
        (Gpu(index=0), ("", "muted")),
        (Gpu(index=0, throttled_by=()), ("At full clock speed", "muted")),
        (Gpu(index=0, throttled_by=("hw_thermal",)), ("Slowed down: thermal limit (hardware)", "warn")),
        (Gpu(index=0, throttled_by=("news",)), ("Slowed down: news", "warn")),
        (Gpu(index=0, ecc_uncorrected=2), ("2 errors in its memory, uncorrected", "bad")),
    ],
)
def test_gpu_state_names_throttling_and_errors(gpu, state):
    assert gpu_state(gpu) == state


def test_gpu_figures_explain_pcie_lanes_and_ecc_errors():
    gpu = Gpu(index=0, pcie_generation=5, pcie_width=16, pcie_sent_bytes_s=1, ecc_corrected=3, ecc_uncorrected=0)
    figures = {figures.name: figures for figures in gpu_figures(gpu)}
    assert figures["PCIe"].meaning == "Sent ↑ and received ↓ by the GPU per second, over 16 lanes of generation 5"
    assert figures["ECC errors"].value == "3 corrected, 0 uncorrected"


def test_unreported_gpu_figures_are_unknown():
    assert {figure.value for figure in gpu_figures(Gpu(index=0))} == {"unknown"}
