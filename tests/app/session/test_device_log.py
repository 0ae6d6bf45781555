"""Tests of the log of device samples: curves per GPU and for the host, bounded memory, and unknown values."""

from __future__ import annotations

import numpy as np

from kvscope_app.session.device_log import HOST, MAX_SAMPLES, DeviceLog
from kvscope_telemetry.messages.devices import Devices, Gpu, Host

SECOND = 1_000_000_000


def sample(*gpus, host=None):
    return Devices(epoch=7, time_ns=1, gpus=gpus, host=host)


def test_curves_exist_for_each_gpu_and_for_the_host():
    log = DeviceLog()
    host = Host(memory_total_bytes=10, memory_available_bytes=4, cores=(0.0, 1.0))
    gpu = Gpu(
        index=0, uuid="a", memory_total_bytes=9, memory_free_bytes=2, pcie_sent_bytes_s=3, pcie_received_bytes_s=4
    )
    log.append(sample(gpu, Gpu(index=1, uuid="b", utilization=0.5), host=host), 5 * SECOND)
    log.append(sample(Gpu(index=0, uuid="a", fault="GPU is lost"), host=host), 6 * SECOND)
    time_s, memory = log.curve("a", "memory_used_bytes")
    assert time_s.tolist() == [5.0, 6.0]
    assert memory[0] == 7
    assert np.isnan(memory[1])
    assert log.curve("a", "pcie_bytes_s")[1][0] == 7
    assert log.curve("b", "utilization")[1].tolist() == [0.5]
    assert log.curve(HOST, "utilization")[1].tolist() == [0.5, 0.5]
    assert log.curve(HOST, "memory_used_bytes")[1].tolist() == [6, 6]
    assert log.curve("c", "utilization")[0].size == 0
    assert (log.begin_s, log.version) == (5.0, 2)


def test_log_keeps_only_the_newest_samples():
    log = DeviceLog()
    num = 3 * MAX_SAMPLES
    for second in range(num):
        log.append(sample(Gpu(index=0, utilization=1.0)), second * SECOND)
    time_s, values = log.curve("GPU 0", "utilization")
    assert time_s.size == values.size == MAX_SAMPLES
    assert (time_s[0], time_s[-1]) == (num - MAX_SAMPLES, num - 1)
    log.clear()
    assert (log.newest, log.begin_s) == (None, None)


def test_samples_with_decreasing_time_are_left_out_of_curves():
    log = DeviceLog()
    for at in (5, 5, 4, 6):
        log.append(sample(Gpu(index=0, utilization=1.0)), at * SECOND)
    assert log.curve("GPU 0", "utilization")[0].tolist() == [5.0, 6.0]
