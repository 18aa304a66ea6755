"""What is sent to a process that may not read: it waits here, so that nobody waits there.

A pipe holds about 200 KB. `Connection.send` beyond that returns once the other side reads, which user's code that hangs
never does, and its time limit would not help: the one who watches the clock stands in `send`. Here a message is kept,
and pushed on while there is room. Reading stays with `Connection`: a message that has begun comes from code of ours.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection


class Outbox:
    """The messages to the process at the other end of `connection`, which takes them by `recv` or `recv_bytes`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._left = b""

    def put(self, message: bytes) -> None:
        """Send `message`, now or while `ready` is called. A reader that has gone is seen by who reads from it."""
        self._left += struct.pack("!i", len(message)) + message  # as `Connection.send_bytes` frames them
        self.push()

    def push(self) -> None:
        """Send what there is room for."""
        pipe = socket.socket(fileno=self.connection.fileno())
        try:
            with contextlib.suppress(BlockingIOError):
                self._left = self._left[pipe.send(self._left, socket.MSG_DONTWAIT) :]
        except ConnectionError:
            self._left = b""
        finally:
            pipe.detach()

    @property
    def events(self) -> int:
        """What to wait for: something to read, and room for what is left."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._left else 0)


def ready(outboxes: Sequence[Outbox], timeout: float | None, *others: Connection) -> set[Connection]:
    """Connections, of outboxes and others, that can be read from within `timeout` seconds; outboxes are pushed on."""
    with selectors.PollSelector() as selector:
        for connection in others:
            selector.register(connection, selectors.EVENT_READ)
        for outbox in outboxes:
            selector.register(outbox.connection, outbox.events, outbox)
        found = selector.select(timeout)
    for key, events in found:
        if events & selectors.EVENT_WRITE and key.data is not None:
            key.data.push()
    return {key.fileobj for key, events in found if events & selectors.EVENT_READ}  # type: ignore[misc]
