"""Whole messages over a socket between rank 0 and one worker. Refuses to know what is in them."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from ...errors import RankFailed
from .message import MessageReader, MessageWriter

_SIZE = struct.Struct("<Q")
_MOST_BYTES = 1 << 36


class RankChannel:
    """One end. A peer that is gone is a RankFailed on this side."""

    def __init__(self, own: socket.socket, peer: str) -> None:
        self._socket, self._peer = own, peer

    def send(self, message: MessageWriter | bytes) -> None:
        """Send a message; waits while the peer is behind."""
        data = message if isinstance(message, bytes) else message.data()
        try:
            self._socket.sendall(_SIZE.pack(len(data)))
            self._socket.sendall(data)
        except OSError as error:
            raise RankFailed(f"{self._peer} does not answer ({error.strerror or error})") from None

    def receive(self) -> MessageReader | None:
        """The next message; None if the peer has closed its end."""
        if (head := self._read(_SIZE.size)) is None:
            return None
        (size,) = _SIZE.unpack(head)
        if size > _MOST_BYTES:
            raise RankFailed(f"{self._peer} sent something that is no message")
        data = self._read(size)
        return None if data is None else MessageReader(data)

    def ask(self, message: MessageWriter | bytes, timeout_s: float | None) -> MessageReader:
        """Send a message and wait for the answer; a peer that is gone or takes too long has failed."""
        self.send(message)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float | None) -> MessageReader:
        """The next message, which must come in time."""
        self._socket.settimeout(timeout_s)
        try:
            found = self.receive()
        except TimeoutError:
            raise RankFailed(f"{self._peer} did not answer within {timeout_s:g} s") from None
        finally:
            self._socket.settimeout(None)
        if found is None:
            raise RankFailed(f"{self._peer} has ended")
        return found

    def close(self) -> None:
        """Close this end; the peer notices."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            try:
                got = self._socket.recv_into(view[at:], min(size - at, 1 << 20))
            except TimeoutError:
                raise
            except OSError:
                return None
            if not got:
                return None
            at += got
        view.release()
        return data
