"""The self-pipe: one byte for many signals, and late signals do no harm."""

from __future__ import annotations

import os
import select
import threading

from kvscope_telemetry.transport.wakeup import Wakeup


def is_readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.reader], [], [], 0)[0])


def test_wakeup_signal_stays_readable_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup)
    for _ in range(3):
        wakeup.signal()
    assert is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.signal()
    assert is_readable(wakeup)
    wakeup.close()


def test_signal_after_close_does_not_write_to_a_reused_descriptor() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.close()
    reader, writer = os.pipe()  # reuses the closed descriptors
    wakeup.signal()
    assert not select.select([reader], [], [], 0)[0]
    os.close(reader)
    os.close(writer)


def test_concurrent_signal_and_close_do_not_deadlock() -> None:
    for _ in range(200):
        wakeup = Wakeup()
        thread = threading.Thread(target=wakeup.close)
        thread.start()
        for _ in range(20):
            wakeup.signal()
        thread.join(60.0)
        assert not thread.is_alive(), "signal and close deadlocked"
