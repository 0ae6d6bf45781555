"""Copies from a device arrive when it is done, and the scheduler never waits; the device is simulated, and runs its
own stream only when told to.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope_inside.sglang.pages import DeviceReader, HostPoolReader, PageSpan, reader_of
from kvscope_inside.sglang.pools import Pools, States, Windows, has_free_list


class FakeDevice:
    """A device that runs the scheduler's stream at once, and every other stream when `run` is called."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.is_aside = False

    def do(self, action: Callable[[], None]) -> None:
        if self.is_aside:
            self.waiting.append(action)
        else:
            action()

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            action()


class Tensor:
    def __init__(self, device: FakeDevice, data: Any, kind: str = "cuda:0") -> None:
        self.on, self.data, self.device = device, np.asarray(data), kind
        self.dtype, self.shape = self.data.dtype, self.data.shape

    def view(self, *_: int) -> Tensor:
        return Tensor(self.on, self.data.reshape(-1), self.device)

    def numpy(self) -> Any:
        assert self.device == "cpu", "a device tensor was read, which would wait for it"
        return self.data

    def __getitem__(self, place: slice) -> Tensor:
        return Tensor(self.on, self.data[place], self.device)

    def __floordiv__(self, other: int) -> Tensor:
        return Tensor(self.on, self.data // other, self.device)

    def clone(self) -> Tensor:
        return Tensor(self.on, self.data.copy(), self.device)

    def to(self, device: Any, *, non_blocking: bool = False) -> Tensor:
        if device is np.int32:
            return Tensor(self.on, self.data.astype(device), self.device)
        assert non_blocking
        return Tensor(self.on, self.data.copy(), device)

    def index_select(self, _: int, index: Tensor) -> Tensor:
        return Tensor(self.on, self.data[index.data])

    def zero_(self) -> None:
        self.on.do(lambda: self.data.fill(0))

    def index_fill_(self, _: int, index: Tensor, value: int) -> None:
        self.on.do(lambda: self.data.__setitem__(index.data, value))

    def copy_(self, other: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.on.do(lambda: self.data.__setitem__(slice(None), other.data))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()

    class Event:
        def __init__(self) -> None:
            self.is_over = False

        def record(self, _: Any) -> None:
            self.is_over = False
            device.do(lambda: setattr(self, "is_over", True))

        def query(self) -> bool:
            return self.is_over

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        device.is_aside = True
        yield
        device.is_aside = False

    def empty(size: Any, *, dtype: Any, pin_memory: bool = False, device: str = "") -> Tensor:
        assert pin_memory or device, "pageable memory would make copies wait"
        return Tensor(this, np.full(size, 77, dtype), "cpu" if pin_memory else device)

    this = device
    module = SimpleNamespace(
        Stream=lambda device: SimpleNamespace(wait_event=lambda event: None),
        Event=Event,
        current_stream=lambda _: None,
        stream=stream,
    )
    torch = SimpleNamespace(
        get_device_module=lambda _: module,
        empty=empty,
        cat=lambda parts: Tensor(this, np.concatenate([part.data for part in parts])),
        int64=np.int64,
        int32=np.int32,
        uint8=np.uint8,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("kvscope_inside.sglang.pages.MAX_ENTRIES", 12)
    return device


def pool_of(device: FakeDevice, page_size: int) -> tuple[Tensor, Any]:
    table = np.arange(40).reshape(4, 10) // page_size * page_size
    free = [Tensor(device, np.array(ids, np.int64)) for ids in ([1, 2], [7], [])]
    allocator = SimpleNamespace(
        page_size=page_size, free_pages=free[0], staged_pages=[free[1]], release_pages=free[2], free_group=None
    )
    return Tensor(device, table), allocator


def pools_with(allocator: Any, num_pages: int, windows: Any = None, states: Any = None) -> Pools:
    return Pools(allocator, allocator.page_size, num_pages, windows, states)


def other_pools(device: FakeDevice, kind: str) -> tuple[Windows, States]:
    """Return pools of 5 pages of 2 tokens, 3 pages of windows, and 4 states: two requests have one each and one keeps
    another.
    """
    mapping = Tensor(device, [0, 0, 4, 5, 0, 0, 2, 3, 0, 0, 0, 0, -1], kind)
    allocator = SimpleNamespace(free_slots=Tensor(device, np.array([2]), kind))
    own, tracked = Tensor(device, [0, 3, 1], kind), Tensor(device, [[0, 0], [4, -1], [0, 0]], kind)
    table = SimpleNamespace(
        req_index_to_mamba_index_mapping=own, req_index_to_mamba_ping_pong_track_buffer_mapping=tracked
    )
    return Windows(mapping, None, 3, 4), States(table, allocator, 4)


@pytest.mark.parametrize("kind", ["cpu", "cuda:0"])
def test_sglang_window_pages_and_states_arrive_as_they_were_when_the_copy_began(kind: str, device: FakeDevice) -> None:
    table, allocator = pool_of(device, 2)
    table.device = kind
    for each in (allocator.free_pages, *allocator.staged_pages, allocator.release_pages):
        each.device = kind
    allocator.release_pages.data = allocator.release_pages.data.astype(np.int64)
    allocator.staged_pages, allocator.free_pages.data = [], np.array([1])
    windows, states = other_pools(device, kind)
    copy = reader_of(table, pools_with(allocator, 5, windows, states)).copy()
    windows.mapping.data[:] = 0  # SGLang goes on
    for each in states.row_tensors:
        each.data[:] = 0
    states.allocator.free_slots = Tensor(device, np.array([1]), kind)
    device.run()
    assert copy.has_arrived()
    assert copy.windows().tolist() == [0, 2, 0, 1, 0, 0]
    free, states_of_rows = copy.states()
    assert np.flatnonzero(free).tolist() == [2]
    assert [each.tolist() for each in states_of_rows] == [[[0], [3], [1]], [[0, 0], [4, -1], [0, 0]]]


def test_sglang_page_table_entries_arrive_as_they_were_when_the_copy_began(device: FakeDevice) -> None:
    table, allocator = pool_of(device, 2)
    reader = reader_of(table, pools_with(allocator, 20))
    assert isinstance(reader, DeviceReader)
    reader.gather([PageSpan(1, 0, 2), PageSpan(3, 1, 1), PageSpan(3, 1, 4)])
    assert reader.num_entries_left() == 7
    table.data[:] = 0  # the row is another's now
    copy = reader.copy()
    allocator.free_pages = Tensor(device, np.array([9]))
    assert not copy.has_arrived()
    assert not reader.can_copy()
    reader.gather([PageSpan(0, 0, 5)])  # pages that are freed meanwhile
    device.run()
    assert copy.has_arrived()
    assert copy.entries().tolist() == [5, 6, 16, 17, 18]
    free = copy.free()
    assert free is not None
    assert np.flatnonzero(free).tolist() == [1, 2, 7]
    copy.done()
    assert reader.can_copy()
    second = reader.copy()
    device.run()
    assert second.entries().tolist() == [0] * 5
    assert np.flatnonzero(second.free()).tolist() == [7, 9]


def test_pool_in_host_memory_is_read_at_once(device: FakeDevice) -> None:
    table, allocator = pool_of(device, 1)
    table.device = "cpu"
    for each in (allocator.free_pages, *allocator.staged_pages, allocator.release_pages):
        each.device = "cpu"
        each.data = each.data.astype(np.int64)
    reader = reader_of(table, pools_with(allocator, 39))
    assert isinstance(reader, HostPoolReader)
    reader.gather([PageSpan(2, 3, 6)])
    copy = reader.copy()
    assert copy.has_arrived()
    assert copy.entries().tolist() == [23, 24, 25]
    assert np.flatnonzero(copy.free()).tolist() == [1, 2, 7]


def test_pages_are_not_read_while_the_allocator_holds_some_back(device: FakeDevice) -> None:
    table, allocator = pool_of(device, 1)
    allocator.free_group = []
    assert not reader_of(table, pools_with(allocator, 39)).can_copy()


def test_sglang_allocator_without_a_free_list_gives_no_free_pages(device: FakeDevice) -> None:
    table, allocator = pool_of(device, 1)
    allocator.free_pages = None
    assert not has_free_list(allocator)
    copy = reader_of(table, pools_with(allocator, 39)).copy()
    device.run()
    assert copy.free() is None
