"""A plain memory read sums every word."""

from typing import Any

import torch

from kvscope_kernels.stream_read import stream_read, stream_read_torch, sums_for


def test_stream_read_sums_every_word(interpret: Any) -> None:
    data = torch.randint(-9999, 9999, (100_001,), dtype=torch.int32)
    found, expected = sums_for(data).fill_(7)[:5], torch.empty(1, dtype=torch.int32)
    interpret(stream_read, data, found)
    stream_read_torch(data, expected)
    assert found.sum(dtype=torch.int32) == expected[0]
