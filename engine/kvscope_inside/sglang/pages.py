"""Reads SGLang's page tables without waiting for the device.

Reads entries of SGLang's table `req_to_token`, the list of free pages and, with other pools, the window page of each
page and the recurrent states of each request. On a device, entries are gathered in the order of the scheduler's stream
and copied on a separate stream to pinned memory; another thread reads them when they have arrived. On a CPU, they can
be read immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvscope_inside.sglang.pools import Pools, has_free_list

MAX_ENTRIES: Final = 1 << 20
"""Maximum number of table entries in one copy. Further entries wait for the next copy."""
Ids = npt.NDArray[np.int64]


class PageSpan(NamedTuple):
    """Range of entries in one table row: pages `first` to `end` (exclusive)."""

    row: int
    first: int
    end: int


class Copy(Protocol):
    """A copy of parts of the page tables on its way to the host."""

    def has_arrived(self) -> bool:
        """Return whether the copy is complete. Does not block."""

    def entries(self) -> Ids:
        """Return the page ids of all gathered ranges, concatenated.

        This method and `free`, `windows`, `states` and `done` may be called only when `has_arrived` returns True.
        """

    def free(self) -> npt.NDArray[np.bool_] | None:
        """Return a mask of free pages, by page id; None if the allocator has no list of free pages."""

    def windows(self) -> Ids | None:
        """Return, for each page of full attention, the window page with the same tokens (0 if there is none);
        None for a model without sliding windows.
        """

    def states(self) -> tuple[npt.NDArray[np.bool_], list[Ids]] | None:
        """Return a mask of free states, and arrays of shape (table rows, columns) with the states of each row's
        request.

        Returns None for a model without recurrent states.
        """

    def done(self) -> None:
        """Release the memory of this copy, so that the next copy can use it."""


class Reader(Protocol):
    """Reads the pools of one scheduler, on the scheduler's thread."""

    def gather(self, spans: Sequence[PageSpan]) -> None:
        """Gather the current table entries of `spans` for the next copy."""

    def gather_slots(self, slots: Any) -> None:
        """Gather the page ids of `slots` (a tensor of slot numbers, in order) for the next copy."""

    def num_entries_left(self) -> int:
        """Return the number of entries that can still be gathered for the next copy."""

    def can_copy(self) -> bool:
        """Return whether a copy can be started: none is in progress, and the list of free pages is complete."""

    def copy(self) -> Copy:
        """Start a copy of all gathered entries, and of the current free pages."""


def reader_of(table: Any, pools: Pools) -> Reader:
    kind = HostPoolReader if str(table.device).startswith("cpu") else DeviceReader
    return kind(table, pools)


def _free_lists(allocator: Any) -> list[Any]:
    """Return the allocator's tensors with the ids of free pages. Allocators replace them and never modify them,
    so no copy is needed.
    """
    if not has_free_list(allocator):
        return []
    staged = getattr(allocator, "staged_pages", None)
    lists = [allocator.free_pages, *(staged or ())]
    released = getattr(allocator, "release_pages", None)
    return [*lists, released] if released is not None else lists


def _slots(spans: Sequence[PageSpan], num_columns: int, page_size: int) -> Ids:
    """Return the index in the flattened table of each page's first token."""
    spans_of = np.array(spans, np.int64).reshape(-1, 3)
    counts = spans_of[:, 2] - spans_of[:, 1]
    ends = np.cumsum(counts)
    page_offsets = np.arange(int(ends[-1]) if len(spans) else 0) - np.repeat(ends - counts, counts)
    starts = spans_of[:, 0] * num_columns + spans_of[:, 1] * page_size
    slots: Ids = np.repeat(starts, counts) + page_offsets * page_size
    return slots


class _HostCopy:
    def __init__(
        self,
        entries: Ids,
        free: list[Any],
        num_rows: int,
        windows: Ids | None,
        states: tuple[Any, int, list[Ids]] | None,
    ) -> None:
        self._entries, self._free, self._num_rows = entries, free, num_rows
        self._windows, self._states = windows, states

    def has_arrived(self) -> bool:
        return True

    def entries(self) -> Ids:
        return self._entries

    def free(self) -> npt.NDArray[np.bool_] | None:
        if not self._free:
            return None
        return _mask(self._free, self._num_rows)

    def windows(self) -> Ids | None:
        return self._windows

    def states(self) -> tuple[npt.NDArray[np.bool_], list[Ids]] | None:
        if self._states is None:
            return None
        free, num_rows, row_tensors = self._states
        return _mask([free], num_rows), row_tensors

    def done(self) -> None:
        self._free = []


def _mask(lists: list[Any], num_rows: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(num_rows, bool)
    for ids in lists:
        mask[ids.numpy()] = True
    return mask


class HostPoolReader:
    def __init__(self, table: Any, pools: Pools) -> None:
        self._table, self._num_columns = table.numpy().reshape(-1), int(table.shape[1])
        self._pools, self._allocator, self._page_size = pools, pools.full, pools.page_size
        self._num_rows = pools.num_pages + 1
        self._gathered: list[Ids] = []

    def gather(self, spans: Sequence[PageSpan]) -> None:
        entries = self._table[_slots(spans, self._num_columns, self._page_size)]
        self._gathered.append(entries.astype(np.int64) // self._page_size)

    def gather_slots(self, slots: Any) -> None:
        self._gathered.append(slots.numpy()[:: self._page_size].astype(np.int64) // self._page_size)

    def num_entries_left(self) -> int:
        return MAX_ENTRIES - sum(map(len, self._gathered))

    def can_copy(self) -> bool:
        return getattr(self._allocator, "free_group", None) is None

    def copy(self) -> Copy:
        gathered, self._gathered = self._gathered, []
        entries = np.concatenate(gathered) if gathered else np.empty(0, np.int64)
        windows, states, size = self._pools.windows, self._pools.states, self._page_size
        return _HostCopy(
            entries,
            _free_lists(self._allocator),
            self._num_rows,
            _pages_of(windows.mapping.numpy()[: self._num_rows * size : size], size) if windows is not None else None,
            (
                states.allocator.free_slots,
                states.num_states + 1,
                [_columns(each.numpy()) for each in states.row_tensors],
            )
            if states is not None
            else None,
        )


def _pages_of(slots: Ids, page_size: int) -> Ids:
    """Return the page ids of slots as a new array. The division is skipped if a page has one token."""
    return slots.copy() if page_size == 1 else slots // page_size


def _columns(states: npt.NDArray[Any]) -> Ids:
    return states.astype(np.int64).reshape(states.shape[0], -1)


class _DeviceCopy:
    def __init__(self, reader: DeviceReader, num_entries: int, references: list[Any], has_free: bool) -> None:
        self._reader, self._num_entries, self._has_free = reader, num_entries, has_free
        self._references = references
        """Tensors that the copy reads. The references keep torch's allocator from reusing their memory too early."""

    def has_arrived(self) -> bool:
        return bool(self._reader.copied.query())

    def entries(self) -> Ids:
        reader = self._reader
        return reader.host_entries[: self._num_entries].astype(np.int64) // reader.page_size

    def free(self) -> npt.NDArray[np.bool_] | None:
        return self._reader.host_free.astype(bool) if self._has_free else None

    def windows(self) -> Ids | None:
        host = self._reader.host_windows
        return host.astype(np.int64) if host is not None else None

    def states(self) -> tuple[npt.NDArray[np.bool_], list[Ids]] | None:
        reader = self._reader
        if reader.host_free_states is None:
            return None
        return reader.host_free_states.astype(bool), [_columns(each) for each in reader.host_states]

    def done(self) -> None:
        self._references = []
        self._reader.is_busy = False


class DeviceReader:
    """Reads pools on a torch device. One copy is in progress at a time."""

    def __init__(self, table: Any, pools: Pools) -> None:
        import torch

        self._torch, self._device = torch, table.device
        self._module = torch.get_device_module(table.device)
        self._table, self._num_columns = table.view(-1), int(table.shape[1])
        self._pools, self._allocator, self.page_size = pools, pools.full, pools.page_size
        num_rows = pools.num_pages + 1
        self._stream = self._module.Stream(device=table.device)
        self._started, self.copied = self._module.Event(), self._module.Event()
        self._slots = torch.empty(2 * MAX_ENTRIES, dtype=torch.int64, pin_memory=True)
        self._half = 0
        """Offset of the half of `_slots` that is written next. The device may still read the other half for the current
        copy.
        """
        self._entries = torch.empty(MAX_ENTRIES, dtype=table.dtype, pin_memory=True)
        self._free = torch.empty(num_rows, dtype=torch.uint8, device=table.device)
        self._host_free_buffer = torch.empty(num_rows, dtype=torch.uint8, pin_memory=True)
        self._host_slots = self._slots.numpy()
        self.host_entries, self.host_free = self._entries.numpy(), self._host_free_buffer.numpy()
        self._num_gathered = 0
        self._gathered: list[Any] = []
        self.is_busy = False
        self.host_windows: npt.NDArray[Any] | None = None
        self.host_free_states: npt.NDArray[Any] | None = None
        self.host_states: list[npt.NDArray[Any]] = []
        self._allocate_other_buffers(table, num_rows)

    def _allocate_other_buffers(self, table: Any, num_rows: int) -> None:
        torch, states = self._torch, self._pools.states
        if self._pools.windows is not None:
            self._host_windows_buffer = torch.empty(num_rows, dtype=torch.int32, pin_memory=True)
            self.host_windows = self._host_windows_buffer.numpy()
        if states is not None:
            self._free_states = torch.empty(states.num_states + 1, dtype=torch.uint8, device=table.device)
            self._host_free_states_buffer = torch.empty(states.num_states + 1, dtype=torch.uint8, pin_memory=True)
            self._host_states_buffers = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in states.row_tensors
            ]
            self.host_free_states = self._host_free_states_buffer.numpy()
            self.host_states = [each.numpy() for each in self._host_states_buffers]

    def gather(self, spans: Sequence[PageSpan]) -> None:
        slots = _slots(spans, self._num_columns, self.page_size)
        first = self._half + self._num_gathered
        end = first + len(slots)
        self._host_slots[first:end] = slots
        indices = self._slots[first:end].to(self._device, non_blocking=True)
        self._gathered.append(self._table.index_select(0, indices))
        self._num_gathered += len(slots)

    def gather_slots(self, slots: Any) -> None:
        firsts = slots[:: self.page_size].to(self._table.dtype)
        self._gathered.append(firsts)
        self._num_gathered += int(firsts.shape[0])

    def num_entries_left(self) -> int:
        return MAX_ENTRIES - self._num_gathered

    def can_copy(self) -> bool:
        return not self.is_busy and getattr(self._allocator, "free_group", None) is None

    def copy(self) -> Copy:
        torch, gathered, num_entries = self._torch, self._gathered, self._num_gathered
        free = _free_lists(self._allocator)
        self._gathered, self._num_gathered, self.is_busy = [], 0, True
        self._half = MAX_ENTRIES - self._half
        others = self._copy_other_pools()
        self._started.record(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            self._stream.wait_event(self._started)
            if gathered:
                concatenated = torch.cat(gathered)
                self._entries[:num_entries].copy_(concatenated, non_blocking=True)
                gathered.append(concatenated)
            if free:
                self._free.zero_()
                for ids in free:
                    self._free.index_fill_(0, ids, 1)
                self._host_free_buffer.copy_(self._free, non_blocking=True)
            for host, device in others:
                host.copy_(device, non_blocking=True)
            if (states := self._pools.states) is not None:
                free_states = states.allocator.free_slots
                self._free_states.zero_()
                self._free_states.index_fill_(0, free_states, 1)
                self._host_free_states_buffer.copy_(self._free_states, non_blocking=True)
                others.append((self._host_free_states_buffer, free_states))
            self.copied.record(self._stream)
        return _DeviceCopy(self, num_entries, [*gathered, *free, *others], bool(free))

    def _copy_other_pools(self) -> list[tuple[Any, Any]]:
        """Return pairs of destination and source tensors for the pools of sliding windows and recurrent states.

        SGLang modifies the sources in place, so they are copied in the order of the scheduler's stream.
        """
        windows, states, size = self._pools.windows, self._pools.states, self.page_size
        others: list[tuple[Any, Any]] = []
        if windows is not None:
            window_slots = windows.mapping[: self._free.shape[0] * size : size]
            others.append((self._host_windows_buffer, (window_slots // size).to(self._torch.int32)))
        if states is not None:
            others += [
                (host, each.clone()) for host, each in zip(self._host_states_buffers, states.row_tensors, strict=True)
            ]
        return others
