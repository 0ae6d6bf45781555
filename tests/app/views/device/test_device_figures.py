"""Devices in words and numbers: whose the memory is, how a GPU is, and what is unknown is said so."""

from __future__ import annotations

import pytest

from kvscope_app.views.device.device_figures import gpu_figures, gpu_state
from kvscope_app.views.device.memory_users import MAX_NAMED, gpu_pieces, host_pieces
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


def test_the_segments_of_a_bar_add_up_to_what_is_taken():
    processes = tuple(GpuProcess(pid=pid, used_bytes=pid * GIB) for pid in range(1, 10))
    gpu = Gpu(
        index=0,
        memory_total_bytes=80 * GIB,
        memory_free_bytes=20 * GIB,
        memory_reserved_bytes=GIB,
        processes=processes,
    )
    pieces = gpu_pieces(gpu)
    assert sum(piece.num_bytes for piece in pieces) == 60 * GIB
    assert [piece.place for piece in pieces[:MAX_NAMED]] == list(range(MAX_NAMED))
    assert pieces[MAX_NAMED].label == "3 more processes"
    assert pieces[-1].label == "no process reported"
    assert sum(piece.num_bytes for piece in host_pieces(HOST)) == 6 * GIB
    assert gpu_pieces(Gpu(index=0)) == host_pieces(Host()) == []


@pytest.mark.parametrize(
    ("gpu", "state"),
    [
        (Gpu(index=0), ("", "muted")),
        (Gpu(index=0, throttled_by=()), ("At full clocks", "muted")),
        (Gpu(index=0, throttled_by=("hw_thermal",)), ("Slowed down: thermal limit (hardware)", "warn")),
        (Gpu(index=0, throttled_by=("news",)), ("Slowed down: news", "warn")),
        (Gpu(index=0, ecc_uncorrected=2), ("2 errors in its memory, uncorrected", "bad")),
    ],
)
def test_the_state_of_a_gpu_in_words(gpu, state):
    assert gpu_state(gpu) == state


def test_a_link_is_explained_by_its_lanes_and_errors_by_what_became_of_them():
    gpu = Gpu(index=0, pcie_generation=5, pcie_width=16, pcie_sent_bytes_s=1, ecc_corrected=3, ecc_uncorrected=0)
    figures = {figures.name: figures for figures in gpu_figures(gpu)}
    assert figures["PCIe"].meaning == "Sent ↑ and received ↓ by the GPU per second, over 16 lanes of generation 5"
    assert figures["ECC errors"].value == "3 corrected, 0 uncorrected"


def test_nothing_known_is_unknown_and_never_zero():
    assert {figure.value for figure in gpu_figures(Gpu(index=0))} == {"unknown"}
