"""The self-pipe: one byte for many signals, and signals that come too late hurt nobody."""

from __future__ import annotations

import os
import select
import threading

from kvscope_telemetry.transport.wakeup import Wakeup


def is_readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.reader], [], [], 0)[0])


def test_signals_are_seen_until_they_are_cleared() -> None:
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


def test_a_signal_after_the_end_writes_into_nobodys_file() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.close()
    reader, writer = os.pipe()  # takes the numbers that were given back
    wakeup.signal()
    assert not select.select([reader], [], [], 0)[0]
    os.close(reader)
    os.close(writer)


def test_signals_and_the_end_may_come_together() -> None:
    for _ in range(200):
        wakeup = Wakeup()
        thread = threading.Thread(target=wakeup.close)
        thread.start()
        for _ in range(20):
            wakeup.signal()
        thread.join(60.0)
        assert not thread.is_alive(), "nobody waits for the other for ever"
