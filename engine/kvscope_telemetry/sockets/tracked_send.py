"""Messages that are handed to ZeroMQ without a copy; a tracker tells when it has let go of them."""

from __future__ import annotations

import zmq


def send_tracked(socket: zmq.Socket[bytes], data: bytes) -> zmq.MessageTracker:
    """Send `data`, which must not change; raises zmq.Again when it cannot be taken."""
    tracker = socket.send(data, zmq.NOBLOCK, copy=False, track=True)
    assert tracker is not None, "a tracked send gives its tracker"
    return tracker
